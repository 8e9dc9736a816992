"""Records what a model's own routers would predict 1 to 3 layers ahead: a trace with pred/gate-1, gate-2, gate-3.

    python experiments/record_gates.py --prompt "To make a good soup, take" --prompt "Once upon a time" --out gates.npz

`gate-d` for layer l is the router of layer l applied to what the router d layers before it saw. The model writes on
from each prompt; then prompt and answer go through it once more in one pass with all experts in memory, which is for
small models.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx

from host_offload.trace import Trace, concatenate
from moe_jax import MoE, OffloadConfig, demo_model_path
from moe_jax.checkpoint import open_checkpoint
from moe_jax.engine.kv_cache import PagedKV
from moe_jax.engine.loading import read_parts
from moe_jax.layers.linear import silu_product

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
AHEAD = (1, 2, 3)


def dense_rows(store):
    """[{name: [E, *shape]}] of each MoE layer, all experts in memory."""
    spec = store.spec
    if set(spec.tensors) != {"gate_up", "down"}:
        raise ValueError(f"model: its experts hold {sorted(spec.tensors)}; this script knows gate_up and down alone")
    layers = []
    for layer in range(spec.L):
        slabs = {name: np.empty((spec.E, *shape), dtype) for name, (shape, dtype) in spec.tensors.items()}
        for name, slab in slabs.items():
            for expert in range(spec.E):
                store.read(layer, expert, name, slab[expert])
        layers.append({name: jnp.asarray(slab) for name, slab in slabs.items()})
    return layers


def make_pass(parts):
    """A jitted function (params, slabs, tokens [1, T]) -> ids, weights [T, L, K], {d: ids [T, L, K], -1 for none}."""
    cfg = parts.cfg

    def run(params, slabs, tokens):
        model = nnx.merge(parts.graphdef, params)
        routers = [model.layers[str(layer)].router for layer in cfg.moe_layers]
        chosen, guesses = [], {ahead: [] for ahead in AHEAD}

        def experts(layer, x, ids, weights, scores, live, token_ids, state):
            chosen.append((ids, weights))
            for ahead in AHEAD:
                if layer + ahead < len(routers):
                    guesses[ahead].append(routers[layer + ahead](x)[0])
            gate_up = jnp.einsum("td,efd->tef", x, slabs[layer]["gate_up"].astype(x.dtype))
            outputs = jnp.einsum("tef,edf->ted", silu_product(gate_up), slabs[layer]["down"].astype(x.dtype))
            picked = jnp.take_along_axis(outputs, ids[:, :, None], axis=1)
            return jnp.sum(picked * weights[:, :, None].astype(x.dtype), axis=1), state

        T = tokens.shape[1]
        kv = PagedKV.create(cfg.cache_layout(), 2, max(8, 1 << (T - 1).bit_length()), 1, 1, parts.dtype)
        kv = replace(kv, page_table=jnp.ones((1, 1), jnp.int32))
        model(tokens, jnp.arange(T)[None], jnp.ones((1, T), bool), kv, experts, jnp.int32(0))
        ids, weights = (jnp.stack(part, axis=1) for part in zip(*chosen, strict=True))
        told = {}
        for ahead, guess in guesses.items():
            none = jnp.full((T, min(ahead, len(routers)), ids.shape[-1]), -1, ids.dtype)
            told[ahead] = jnp.concatenate([none, *([jnp.stack(guess, axis=1)] if guess else [])], axis=1)
        return ids, weights, told

    return jax.jit(run)


def record(parts, sequences, prompt_lengths, name):
    """The trace of `sequences` (ids of each), one request each: a step for the prompt, one for every later token."""
    slabs, one_pass = dense_rows(parts.store), make_pass(parts)
    cfg, traces = parts.cfg, []
    header = {
        "moe_layers": list(cfg.moe_layers),
        "E": cfg.num_experts,
        "K": cfg.num_experts_per_tok,
        "chunk": max(prompt_lengths),
        "scope": "layer",
        "slots": len(cfg.moe_layers) * cfg.num_experts,
        "contract": "atomic-bypass",
        "policy": "none",
        "model": name,
        "dtype": str(parts.dtype),
    }
    for ids, prompt in zip(sequences, prompt_lengths, strict=True):
        experts, weights, told = jax.device_get(one_pass(parts.params, slabs, jnp.asarray(ids, jnp.int32)[None]))
        place = np.arange(len(ids))
        step = np.maximum(place - prompt + 1, 0)
        pred = {f"gate-{ahead}": guess.astype(np.int16) for ahead, guess in told.items()}
        phase = (place >= prompt).astype(int)
        request = np.zeros(len(ids), int)
        traces.append(Trace.from_rows(experts, weights, phase, request, step, header, pred=pred))
    return concatenate(traces)


@app.command()
def main(
    prompt: Annotated[list[str], typer.Option(help="text to write on from; repeat it for more requests")],
    out: Annotated[Path, typer.Option(help="the trace, .npz")],
    model: Annotated[str, typer.Option(help="checkpoint directory; default: the demo model")] = "",
    tokens: Annotated[int, typer.Option(help="new tokens of each request")] = 64,
):
    """Generates, then records."""
    model = model or str(demo_model_path())
    settings = OffloadConfig(progress=False)
    with MoE(model, settings) as moe:
        prompts = [list(moe.tokenizer(text)["input_ids"]) for text in prompt]
        # Prompt and new tokens; the last one is never fed.
        sequences = [moe.generate(np.asarray(ids, np.int32), tokens, eos_token_id=[])[:-1] for ids in prompts]
    with open_checkpoint(model) as files:
        trace = record(read_parts(files, settings, False), sequences, [len(ids) for ids in prompts], Path(model).name)
    trace.save(out)
    print(f"{out}: {len(trace.step)} tokens of {len(prompts)} requests, pred/{', pred/'.join(trace.pred)}")


if __name__ == "__main__":
    app()
