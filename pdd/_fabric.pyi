"""The compiled face of native/pdd_fabric.h (see native/build_ffi.py)."""

from typing import Any

ffi: Any
lib: Any
