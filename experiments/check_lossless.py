"""Does this machine give the same tokens whatever the cache does? Walks transports, policies, slots and contracts.

    python experiments/check_lossless.py [--model DIR]

Every run must give the tokens of the resident mode, after every decode step each occupied slot must hold its expert's
bytes, and a fault planted in a copy must surface as an error, after which the next call is right again. Exit 1 if not.
"""

import itertools
import time

import jax
import numpy as np
import typer

from moe_jax import MoE, demo_model_path
from moe_jax.errors import TransportError

PROMPTS = ["Once upon a time there was a little girl who", "The capital of France is", "def main(args):\n    "]


def same(a, b) -> bool:
    """Whether two lists of token lists are equal."""
    return [list(map(int, row)) for row in a] == [list(map(int, row)) for row in b]


def plant_fault(transport):
    """Makes the third copy from now fail; returns a function that undoes it."""
    mover = transport.mover
    move, count = mover.move, itertools.count()

    def failing(*args):
        if next(count) == 2:
            raise OSError("planted fault")
        return move(*args)

    mover.move = failing
    return lambda: setattr(mover, "move", move)


def main(
    model: str = typer.Option(
        str(demo_model_path()), help="checkpoint directory or hub id", show_default="the demo model"
    ),
    tokens: int = typer.Option(24, help="new tokens of each run"),
    dtype: str = typer.Option("float32", help="compute dtype"),
):
    """Compares tokens and slots over transports, policies, slots and contracts; prints one line a setting.

    Ends with 1 if a run's tokens are not those of the resident mode, if a slot does not hold its expert, or if a
    planted fault goes unseen.
    """
    started = time.time()
    failures = 0
    base = {"dtype": dtype, "max_batch": 4, "decode_chunk": 8, "progress": False, "max_sequence_length": 512}

    def ids(moe, batch):
        prompts = [moe.tokenizer(p)["input_ids"] for p in PROMPTS[:batch]]
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(p)) + p for p in prompts]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        out = moe.generate(np.array(padded), tokens, attention_mask=np.array(mask), eos_token_id=[])
        return out[:, longest:]

    with MoE(model, {**base, "transport": "resident"}) as moe:
        wanted = {batch: ids(moe, batch) for batch in (1, 3)}
        print(f"{jax.devices()[0].device_kind}: {moe.stats()['kernel'][0]}, {dtype}")

    def report(label, ok, detail=""):
        nonlocal failures
        failures += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {label} {detail}", flush=True)

    with MoE(model, {**base, "transport": "device"}) as moe:
        layers, experts = moe.stats()["experts"]["layers"], moe.stats()["experts"]["per_layer"]
        for transport in ("device", "callback"):
            for policy, share in itertools.product(("lru", "lfu", "lfru", "static"), (0.125, 0.5, 1.0)):
                scope = "global" if policy in ("lfu", "static") else "layer"
                contract = "atomic-forced-admit" if share == 0.5 else "atomic-bypass"
                slots = int(share * layers * experts) | 1 if share < 1 else layers * experts
                moe.set_cache(policy, slots=slots, scope=scope, contract=contract, transport=transport)
                good = all(same(ids(moe, batch), wanted[batch]) for batch in (1, 3))
                moe.verify_slots()
                rate = moe.stats()["last"]["decode"]["hit_rate"]
                report(f"{transport} {policy} {slots} slots {scope} {contract}", good, f"hit rate {rate:.2f}")
            moe.set_cache("lfru", cache_rate=0.25, scope="layer", contract="atomic-bypass", transport=transport)
            steps, moe._engine.decode_chunk = 0, 1
            for _ in moe.stream_ids(PROMPTS[0], tokens, eos_token_id=[]):
                moe.verify_slots()
                steps += 1
            moe._engine.decode_chunk = base["decode_chunk"]
            report(f"{transport}: slots hold their experts after each of {steps} steps", True)
        undo = plant_fault(moe._engine.transport)
        try:
            ids(moe, 1)
            report("planted fault", False, "nothing was raised")
        except TransportError as error:
            kept = len(error.partial[0])
            report("planted fault surfaces", True, f"({error}; {kept} ids kept)")
        undo()
        report("after the fault", same(ids(moe, 1), wanted[1]))
    print(f"{'all equal' if not failures else f'{failures} FAILED'} in {time.time() - started:.0f} s")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
