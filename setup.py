"""The one part of the build that pyproject.toml cannot say: the compiled copies of KV blocks."""

from setuptools import Extension, setup

COPY = Extension("baton._kv_copy", ["baton/_kv_copy.c"], extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"])
setup(ext_modules=[COPY])
