"""New weights under a captured graph: the experts are quantized again in place, and the replay computes with
them. Without a GPU the same is shown by calling the layer again.

    python refit.py
"""

import torch

from hexpert.torch import RoutedExperts


def capture(experts, x, ids, probabilities, out):
    """A function that runs the layer: the replay of a captured graph on a GPU."""
    if x.device.type != "cuda":
        return lambda: experts(x, ids, probabilities, out)
    experts(x, ids, probabilities, out)  # torch wants a run before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(x, ids, probabilities, out)
    return graph.replay


@torch.no_grad()
def main(device):
    torch.manual_seed(0)
    num_experts, hidden, inter, tokens, top_k = 8, 256, 192, 16, 2
    # Two steps of training: the weights before and after.
    steps = [
        [
            (torch.randn(num_experts, 2 * inter, hidden, device=device) / 16).bfloat16(),
            (torch.randn(num_experts, hidden, inter, device=device) / 14).bfloat16(),
        ]
        for _ in range(2)
    ]
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    ids = torch.randint(num_experts, (tokens, top_k), device=device)
    probabilities = torch.full((tokens, top_k), 1 / top_k, device=device)
    out = torch.empty_like(x)

    experts = RoutedExperts(*steps[0], top_k=top_k, max_tokens=tokens)
    replay = capture(experts, x, ids, probabilities, out)
    replay()
    first = out.clone()
    experts.refresh(*steps[1])  # same addresses: the graph stays valid
    replay()
    second = out.clone()
    fresh = RoutedExperts(*steps[1], top_k=top_k, max_tokens=tokens)(x, ids, probabilities)
    print(f"{device}: new result {not torch.equal(first, second)}, as prepared anew {torch.equal(second, fresh)}")
    return 0 if torch.equal(second, fresh) and not torch.equal(first, second) else 1


def cuda_works():
    import hexpert

    return torch.cuda.is_available() and any(b.available and b.device == "cuda" for b in hexpert.list_backends())


if __name__ == "__main__":
    raise SystemExit(main("cuda" if cuda_works() else "cpu"))
