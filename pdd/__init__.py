"""pdd: disaggregated prefill/decode serving for LLMs."""

__version__ = "0.1.0"
