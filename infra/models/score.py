"""What a Hugging Face folder holds, as transformers loads it: `python -m infra.models.score FOLDER`.

Token sequences come as JSON on standard input; the answer is JSON: every tensor's digest, and the logprob of each token
but the first (nats, temperature 1). A process of its own, so that nothing of it stays in the caller.
"""

import json
import sys


def main(folder: str) -> None:
    """Load, digest, score."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from infra.models.beam.register import register
    from infra.policy.version import tensor_digest

    register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    AutoTokenizer.from_pretrained(folder)
    digests = {name: tensor_digest(tensor) for name, tensor in model.state_dict().items()}
    model.float()  # the weights as they are; products in bf16 would add a difference that is nobody's fault
    logprobs = []
    with torch.inference_mode():
        for tokens in json.load(sys.stdin):
            ids_1T = torch.tensor([tokens])
            logits_TV = model(ids_1T).logits[0, :-1].float()
            logprobs.append(logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0].tolist())
    print(json.dumps({"digests": digests, "logprobs": logprobs}))


if __name__ == "__main__":
    main(sys.argv[1])
