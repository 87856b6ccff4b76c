"""A generator that follows a script, and small real tokenizers: what the tests of the HTTP floor stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pdd.base.errors import PddError
from pdd.base.ids import RequestId
from pdd.engine.config import TextConfig
from pdd.http.text import Text
from pdd.http.vocabulary import TokenizerVocabulary
from pdd.lifecycle.request import ErrorInfo, FinishReason, GenerateRequest, Readiness, TokenLogprobs, TokenOutput

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. User: what is it? Assistant: a fox!\n\n",
    "Größe, naïve café, 日本語のテキスト, emoji 🦊🐶 and more emoji 🎉.",
    "def main():\n    return [1, 2, 3]\n",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("    ", special=False)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """As Llama 2 has it: U+2581 for spaces, a token for each byte, and a decoder that strips the first space."""
    words = ["▁the", "▁quick", "▁fox", "▁Hello", "▁", "H", "e", "l", "o", "f", "x", "t", "h", "▁日", "本"]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def chat_text(**changes: object) -> Text:
    tokenizer = byte_level_tokenizer()
    config = TextConfig(
        kind="tokenizer",
        bos_token_id=0,
        eos_token_ids=(2,),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        **changes,  # type: ignore[arg-type]
    )
    return Text(config, TokenizerVocabulary(tokenizer, tokenizer.get_vocab_size()))


Script = Callable[[GenerateRequest], Iterable[TokenOutput | PddError | asyncio.Event]]


def outputs_of(
    request: GenerateRequest, tokens: list[int], *, finish: FinishReason = FinishReason.STOP, step: int = 1
) -> list[TokenOutput]:
    """`tokens` in outputs of `step` tokens, cut at max_tokens and ended by the first stop token, as an engine does."""
    sampling = request.sampling
    stop = next((i for i, token in enumerate(tokens) if token in sampling.stop_token_ids), None)
    if stop is not None:
        tokens = tokens[: stop + 1]
    if len(tokens) > sampling.max_tokens:
        tokens, finish, stop = tokens[: sampling.max_tokens], FinishReason.LENGTH, None
    result = []
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        last = start + step >= len(tokens)
        logprobs = (
            () if sampling.num_logprobs is None else tuple(_logprobs(token, sampling.num_logprobs) for token in part)
        )
        result.append(
            TokenOutput(
                request=request.id,
                tokens=tuple(part),
                logprobs=logprobs,
                num_cached_tokens=4,
                finish_reason=finish if last else None,
                stop_token=tokens[-1] if last and stop is not None else None,
            )
        )
    return result


def _logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, tuple((token + rank if rank else token, -0.5 - rank) for rank in range(count)))


def failure(request: GenerateRequest, status: int = 502, code: str = "handoff_failed") -> TokenOutput:
    return TokenOutput(request=request.id, error=ErrorInfo(code, "the prefiller went away", status, True))


class FakeGenerator:
    """Yields what `script` gives for a request, raises its errors, and waits for its events."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.stopped: list[RequestId] = []
        self.shown_at: dict[RequestId, int] = {}
        """How many outputs had been yielded when the first bytes of a sequence were to go out."""
        self.num_yielded = 0
        self.closed: dict[RequestId, bool] = {}
        """Ended requests: whether they were closed before their last output."""
        self.any_submitted = asyncio.Event()
        self.any_closed = asyncio.Event()
        self.ready = Readiness(True, "serving")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        self.any_submitted.set()
        early = True
        try:
            for step in self.script(request):
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    await asyncio.sleep(0)
                    self.num_yielded += 1
                    early = not step.last
                    yield step
        finally:
            self.closed[request.id] = early
            self.any_closed.set()

    def shown(self, request: RequestId) -> None:
        self.shown_at.setdefault(request, self.num_yielded)

    def stop(self, request: RequestId) -> None:
        self.stopped.append(request)

    def readiness(self) -> Readiness:
        return self.ready

    def health(self) -> dict[str, object]:
        return {"node": "n0", "running": len(self.requests) - len(self.closed)}

    def metrics_text(self) -> bytes:
        return b"# HELP pdd_up up\npdd_up 1\n"
