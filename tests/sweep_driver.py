"""A sweep as its own process, to be killed: OUT, then sweep's options and the runs as JSON."""

from __future__ import annotations

import json
import sys

from torchgdu.config import RunConfig
from torchgdu.overview import watch
from torchgdu.records import RunError
from torchgdu.sweep import Stopped, sweep


def main() -> int:
    out, options, runs = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    try:
        with watch() as watcher:
            jobs = sweep(map(RunConfig.from_dict, runs), out, watcher=watcher, **options)
    except RunError as error:
        print(f"Error: {error}", flush=True)
        return 5
    except Stopped as stopped:
        return 128 + stopped.number
    return 0 if all(job.state == "done" for job in jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
