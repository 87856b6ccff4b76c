"""The compiled face of native/pdd_fabric.h (see native/build_ffi.py)."""

from typing import Any

from cffi import FFI

ffi: FFI
lib: Any
