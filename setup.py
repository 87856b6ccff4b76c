"""The part of the build that pyproject.toml cannot say: C extensions, each described by its own file in native/."""

from pathlib import Path

from setuptools import setup

BUILDERS = ["native/build_ffi.py", "native/build_attention.py"]

setup(cffi_modules=[f"{builder}:ffibuilder" for builder in BUILDERS if Path(builder).exists()])
