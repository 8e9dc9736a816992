"""Makes notebooks/compare_with_pytorch.json, or with --check compares it with a fresh run; needs torch, not jax.

    .venv-oracle/bin/python tests/torch_reference.py [--check]

The code that runs PyTorch is the notebook's own cell, so file and notebook cannot drift apart.
"""

import ast
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "compare_with_pytorch.ipynb"
STORED = NOTEBOOK.with_suffix(".json")


def notebook_code():
    """(source of the cell tagged `with-torch`, prompts, number of new tokens) of the notebook."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    tagged = [cell for cell in cells if "with-torch" in cell["metadata"].get("tags", ())]
    if len(tagged) != 1:
        raise ValueError(f"{NOTEBOOK.name}: expected one cell with the tag 'with-torch', found {len(tagged)}")
    assigned = {
        node.targets[0].id: node.value
        for cell in cells
        for node in ast.parse("".join(cell["source"])).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    prompts, new_tokens = (ast.literal_eval(assigned[name]) for name in ("prompts", "new_tokens"))
    return "".join(tagged[0]["source"]), prompts, new_tokens


def fresh():
    """The reference, computed now."""
    code, prompts, new_tokens = notebook_code()
    names = {"os": os, "time": time}
    exec(compile(code, NOTEBOOK.name, "exec"), names)
    return names["run_with_torch"](ROOT / "moe_jax" / "demo_model", prompts, new_tokens)


def differences(stored, now):
    """Messages about what differs beyond rounding; times and versions may."""
    found = [] if stored["prompts"] == now["prompts"] else ["prompts"]
    for index, (a, b) in enumerate(zip(stored["answers"], now["answers"], strict=False)):
        found += [f"answer {index}: {name}" for name in ("prompt_ids", "new_ids") if a[name] != b[name]]
        if not np.allclose(a["next_token_logits"], b["next_token_logits"], atol=1e-3):
            found.append(f"answer {index}: next_token_logits")
    return found


if __name__ == "__main__":
    made = fresh()
    if "--check" not in sys.argv:
        STORED.write_text(json.dumps(made, indent=1) + "\n")
        print(f"wrote {STORED.relative_to(ROOT)}")
    elif found := differences(json.loads(STORED.read_text()), made):
        sys.exit(f"{STORED.relative_to(ROOT)} differs from PyTorch in: {'; '.join(found)}")
    else:
        print(f"{STORED.relative_to(ROOT)}: as PyTorch computes it")
