"""The type of what `add_subparsers` returns, which argparse keeps private."""

from __future__ import annotations

import argparse

Commands = argparse._SubParsersAction[argparse.ArgumentParser]
