"""Write tests/pretrained/reference/*.json with transformers: python tests/pretrained/make_reference.py [CASE ...]"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from tests.helpers.pretrained_models import CASES, POSITIONS, REFERENCE, in_files, tokens, weight


def build(case: str) -> Any:
    """The model of a case, as transformers computes it in float32."""
    kind, options = CASES[case]
    config = transformers.AutoConfig.for_model(kind, bos_token_id=1, eos_token_id=2, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for of_file, values in in_files(name, parameter.numpy(), case).items():
                values[...] = weight(of_file, values.shape, case)
    return model


def saved_config(model: Any) -> dict[str, Any]:
    """config.json, as save_pretrained writes it."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return json.loads((Path(directory) / "config.json").read_text())


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        model = build(case)
        with torch.no_grad():
            logits = model(torch.tensor(tokens()[:, :-1])).logits.numpy()
        parameters = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        of_files = [in_files(name, values, case) for name, values in parameters.items()]
        tensors = {name: list(values.shape) for one in of_files for name, values in one.items()}
        record = {
            "config": saved_config(model),
            "tensors": tensors,
            "spread": float(logits.max() - logits.min()),
            "logits": [[float(f"{x:.8g}") for x in row] for row in logits[0, POSITIONS].tolist()],
        }
        (REFERENCE / f"{case}.json").write_text(json.dumps(record) + "\n")
        print(f"{case}: logits spread by {record['spread']:.1f}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
