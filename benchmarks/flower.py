"""What coterie adds to a Flower exchange: the same bytes as plain Flower messages, and as orders to workers that stay.

    python -m benchmarks.flower --clients 2 --numbers 100000 --repeats 5

One deployment on loopback; the three kinds of exchange alternate, so that whatever else the machine does disturbs all
alike. Ratios of medians are what counts.

    plain   a ClientApp that adds 1 to an array of numbers, torch not imported
    torch   the same in a process that imports torch, as a Flower client that trains does
    coterie a work on the worker's shard, through codec, relay and socket
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

PLAIN = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from coterie.engines.flower.relay import client_app

app = client_app("bench.data:load", modules=("bench.data",))


@app.query("plain")
def plain(message, context):
    x = message.content.array_records["a"]["x"].numpy()
    return Message(RecordDict({"a": ArrayRecord({"x": Array(x + 1)})}), reply_to=message)


@app.query("torch")
def with_torch(message, context):
    import torch

    x = torch.from_numpy(message.content.array_records["a"]["x"].numpy().copy())
    return Message(RecordDict({"a": ArrayRecord({"x": Array((x + 1).numpy())})}), reply_to=message)
"""

DATA = """
import torch
from torch import nn

from coterie.federation import work
from coterie.flower import ClientData


@work
def plus_one(shard, shared, private, static, draw):
    return shared + 1


def load(node_config, run_config):
    x = torch.zeros(4, 2)
    return ClientData((x, torch.zeros(4, dtype=torch.int64)), nn.Linear(2, 2), "cross_entropy")
"""

SERVER = """
import json
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from bench.data import plus_one
from coterie.federation.api import Call
from coterie.federation.remote import Names, Policy, RemoteEngine
from coterie.federation.work import Static
from coterie.engines.flower.transport import FlowerTransport
from coterie.numerics import Draw

app = ServerApp()


@app.main()
def main(grid, context):
    settings = context.run_config
    n, numbers = int(settings["clients"]), int(settings["numbers"])
    names = Names().with_modules("bench.data")
    engine = RemoteEngine(FlowerTransport(grid), n, None, names=names, policy=Policy(timeout=600, patience=600))
    engine.connect()
    x = torch.randn(numbers)
    seconds = {"plain": [], "torch": [], "coterie": []}

    def plain(kind):
        record = RecordDict({"a": ArrayRecord({"x": Array(x.numpy())})})
        messages = [Message(record, dst_node_id=k, message_type=f"query.{kind}") for k in grid.get_node_ids()]
        ids, replies = set(grid.push_messages(messages)), 0
        while replies < len(messages):
            for reply in grid.pull_messages(list(ids)):
                assert not reply.has_error(), reply.error
                reply.content.array_records["a"]["x"].numpy()
                ids.discard(reply.metadata.reply_to_message_id)
                replies += 1
            time.sleep(0.1)

    def ours():
        (replies,) = engine.execute(Call(plus_one, x, None, Static(), Draw.of(0)), torch.arange(n))
        assert len(replies.ids) == n and torch.equal(replies.values[0], x + 1)

    for i in range(int(settings["repeats"]) + 1):
        for kind in seconds:
            start = time.perf_counter()
            ours() if kind == "coterie" else plain(kind)
            if i:  # the first starts workers and fills caches
                seconds[kind].append(time.perf_counter() - start)
    Path(settings["answer"]).write_text(json.dumps(seconds))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--numbers", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()

    from coterie.engines.flower.deployment import Deployment

    with Deployment() as flower:
        place = flower.folder / "bench-app"
        answer = flower.folder / "answer.json"
        write(place, {**vars(given), "answer": str(answer)})
        flower.superlink()
        for k in range(given.clients):
            flower.supernode(k, given.clients)
        run = flower.submit(place)
        while not answer.exists():
            time.sleep(1.0)
            if "superlink" in flower.ended():
                sys.exit(flower.log("superlink")[-2000:])
        print(f"run {run}: {given.clients} clients, {given.numbers} numbers each way", file=sys.stderr)
        time.sleep(0.5)
        seconds = json.loads(answer.read_text())
    medians = {kind: round(median(values), 2) for kind, values in seconds.items()}
    ratios = {f"coterie/{kind}": round(medians["coterie"] / medians[kind], 2) for kind in ("plain", "torch")}
    print(json.dumps({**vars(given), "seconds": medians, **ratios}, indent=2))


def write(place: Path, settings: dict[str, object]) -> None:
    import tomli_w

    (place / "bench").mkdir(parents=True)
    files = {"__init__": "", "client": PLAIN, "data": DATA, "server": SERVER}
    for name, text in files.items():
        (place / "bench" / f"{name}.py").write_text(text)
    about = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {"name": "bench", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "coterie",
                    "components": {"serverapp": "bench.server:app", "clientapp": "bench.client:app"},
                    "config": settings,
                }
            },
        },
    }
    (place / "pyproject.toml").write_text(tomli_w.dumps(about))


if __name__ == "__main__":
    main()
