"""One process of one contender: `worker.py TASK`, with the task as JSON.

A task names its role: `train` (trains in turns, as told), `first-step`, `one-device`, `import`
(imports torch and nothing else), or `neighbour` (slows its cores, as told). The roles' results are
described in `roles.py`, and where they are asked for.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from channel import Channel


def main() -> None:
    channel = Channel()
    task = json.loads(sys.argv[1])
    # Before torch is imported, which sizes its thread pools by the cores it may use.
    os.sched_setaffinity(0, task["cores"])
    try:
        _serve(channel, task)
    except Exception as error:  # noqa: BLE001 (whatever it is, the harness must hear of it)
        traceback.print_exc()
        channel.say(error=f"{type(error).__name__}: {error}")


def _serve(channel: Channel, task: dict[str, Any]) -> None:
    if task["role"] == "import":
        start_s = time.perf_counter()
        import torch  # noqa: F401, PLC0415 (this is what is measured)

        channel.say(seconds=time.perf_counter() - start_s)
        for _ in channel.requests():
            channel.say()
        return

    # Late, for the sake of the role above.
    import roles  # noqa: PLC0415

    roles.ROLES[task["role"]](channel, task)


if __name__ == "__main__":
    main()
