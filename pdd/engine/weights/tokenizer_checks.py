"""What every source checks of its tokenizer, whatever it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer

from pdd.base.errors import ModelInvalid
from pdd.engine.config import ModelConfig


@contextmanager
def building(where: str) -> Iterator[None]:
    """Turns what the tokenizers library throws at damaged data into ModelInvalid."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ModelInvalid):
        raise
    except BaseException as error:  # bare Exceptions, and where its Rust code panics not even those
        raise ModelInvalid(f"{where}: no readable tokenizer ({error}); fetch the model again") from error


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, where: str) -> None:
    """Raises ModelInvalid where a token could be made that the network has no embedding of."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest < 0:
        raise ModelInvalid(f"{where}: the tokenizer's vocabulary is empty; fetch the model again")
    if largest >= config.vocab_size:
        raise ModelInvalid(
            f"{where}: the tokenizer knows token {largest}, but the model's vocab_size is {config.vocab_size}: they do "
            f"not belong together; fetch the model again"
        )
