"""Expected logits of the sampler, computed by the logits processors of transformers.

    python tests/sampling_oracle.py --write     # computes tests/data/sampling.npz; needs torch
    python tests/sampling_oracle.py --check     # recomputes it and fails on any difference

The processors are those that `generate` itself builds from a GenerationConfig, so their order is transformers' own.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data" / "sampling.npz"
SETTING_NAMES = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
PAD = 0


def settings() -> np.ndarray:
    """Grid of settings, f64 [N, 5] in the order of SETTING_NAMES; 0 (1 for penalty and top_p) turns a stage off."""
    neutral = (1.0, 1.0, 0, 1.0, 0.0)
    values = ((1.0, 1.3, 0.7), (1.0, 0.6, 1.7), (0, 1, 5, 50, 500), (1.0, 0.95, 0.5, 0.0), (0.0, 0.05, 0.5, 1.0))
    alone = [neutral[:i] + (v,) + neutral[i + 1 :] for i in range(len(values)) for v in values[i]]
    together = list(itertools.product(*values))
    chosen = np.random.default_rng(7).choice(len(together), 40, replace=False)
    return np.array(alone + [together[i] for i in chosen], np.float64)


def inputs() -> dict[str, np.ndarray]:
    """Logits f32 [B, V] and left-padded prompts with their mask i64 [B, T].

    Row 0 is flat, row 1 peaked, row 2 holds tokens that cannot come (-inf), row 3 has logits that tie (top-k keeps
    all that tie with the k-th).
    """
    rng = np.random.default_rng(3)
    V, T = 83, 9
    logits = np.stack([rng.normal(0, scale, V) for scale in (0.5, 4.0, 2.0, 1.0)]).astype(np.float32)
    logits[2, ::5] = -np.inf
    logits[3, :8] = logits[3].max() + 1 + np.float32([0, 0, 1, 1, 1, 2, 3, 0])
    prompts = rng.integers(1, V, (4, T))
    mask = np.ones((4, T), np.int64)
    mask[1, :4] = 0
    prompts[mask == 0] = PAD
    return {"logits": logits, "prompts": prompts.astype(np.int64), "mask": mask}


def compute() -> dict[str, np.ndarray]:
    """Inputs, settings and `processed` f32 [N, B, V] from transformers. Needs torch.

    Settings with 0 < top_p < 1 leave row 3 out (NaN): which of two equal logits goes is up to torch's unstable sort.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    data = inputs()
    V = data["logits"].shape[1]
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=V, **sizes))
    prompts, mask = torch.tensor(data["prompts"]), torch.tensor(data["mask"])
    processed = []
    for row in settings():
        chosen = dict(zip(SETTING_NAMES, row.tolist(), strict=True)) | {"top_k": int(row[2])}
        config = GenerationConfig(do_sample=True, pad_token_id=PAD, max_new_tokens=1, **chosen)
        config._eos_token_tensor = None  # set by generate, which is not run here
        processors = model._get_logits_processor(
            config,
            input_ids_seq_length=prompts.shape[1],
            encoder_input_ids=prompts,
            prefix_allowed_tokens_fn=None,
            logits_processor=[],
            device="cpu",
            model_kwargs={"attention_mask": mask},
        )
        result = processors(prompts, torch.tensor(data["logits"])).numpy().copy()
        if chosen["top_p"] < 1:
            result[3] = np.nan
        processed.append(result)
    return data | {"settings": settings(), "processed": np.stack(processed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true", help="write tests/data/sampling.npz")
    mode.add_argument("--check", action="store_true", help="recompute and compare with tests/data/sampling.npz")
    arguments = parser.parse_args()
    computed = compute()
    if arguments.write:
        DATA.parent.mkdir(exist_ok=True)
        np.savez_compressed(DATA, **computed)
        print(f"wrote {DATA.name}: {len(computed['settings'])} settings, {DATA.stat().st_size} bytes")
        return 0
    with np.load(DATA) as stored:
        if set(stored.files) != set(computed):
            print(f"{DATA.name} holds {sorted(stored.files)}, expected {sorted(computed)}")
            return 1
        for name, value in computed.items():
            same = stored[name].shape == value.shape and np.allclose(stored[name], value, 1e-6, 1e-6, equal_nan=True)
            if not same:
                print(f"{DATA.name}: {name} differs from what transformers computes")
                return 1
    print(f"{DATA.name} agrees with transformers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
