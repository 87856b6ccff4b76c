"""What native/build_attention.py builds; the functions are those of native/pdd_attention.h."""

from typing import Any

ffi: Any
lib: Any
