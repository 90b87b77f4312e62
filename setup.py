"""The one part of the build that pyproject.toml cannot say: what is compiled."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c11", "-Wall", "-Wextra"]
COPY = Extension("baton._kv_copy", ["baton/_kv_copy.c"], extra_compile_args=FLAGS)
PREFIX_INDEX = Extension("router._prefix_index", ["router/_prefix_index.c"], extra_compile_args=FLAGS)
setup(ext_modules=[COPY, PREFIX_INDEX])
