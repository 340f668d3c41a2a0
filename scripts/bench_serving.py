#!/usr/bin/env python3
"""An engine in process, then the same engine over HTTP: `jaxserve bench MODEL --http` without an installed command.

python scripts/bench_serving.py llama-3-8b --concurrency 1,64 --client openai --client-processes 8
"""

import sys

from jaxserve.cli.main import build_app

if __name__ == "__main__":
    build_app()(["bench", "run", *sys.argv[1:], "--http"], prog_name="jaxserve")
