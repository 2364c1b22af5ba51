"""What a run says: metrics.jsonl, TensorBoard and W&B where asked, a progress bar or plain lines, a loss plot."""

import jax


def say(text: str) -> None:
    """One line, from process 0 only."""
    if jax.process_index() == 0:
        print(text, flush=True)
