"""Jacobians of single samples in float64, row by row by autograd, and what C24 defines of them, by ``svdvals``."""

import contextlib

import torch


def places(model, x, names):
    """What a model does to one sample x (1, …): for its input and each layer's, x (M,) and J (C, M).

    Inputs of all calls of a layer are side by side. The model's input, named "", is there if it is floating-point.
    """
    seen = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        for name in names:
            hook = model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: seen[name].append(args[0])
            )
            stack.callback(hook.remove)
        if x.is_floating_point():
            x = x.detach().clone().requires_grad_()
            seen[""] = [x]
        outputs = model(x if not x.requires_grad else x * 1.0).flatten()
    found = {}
    for name, tensors in seen.items():
        rows = [torch.autograd.grad(f, tensors, retain_graph=True, allow_unused=True) for f in outputs]
        rows = [
            torch.cat([(torch.zeros_like(t) if g is None else g).flatten() for g, t in zip(row, tensors, strict=True)])
            for row in rows
        ]
        found[name] = torch.cat([t.detach().flatten() for t in tensors]), torch.stack(rows)
    return found


def measures(x, jacobian, top=None):
    """Return the measures of one sample, without the logarithm of a volume that is not there."""
    s = torch.linalg.svdvals(jacobian)
    outputs = len(jacobian)
    s = torch.cat([s, s.new_zeros(outputs - len(s))])
    s = torch.where(s > 4 * outputs * torch.finfo(s.dtype).eps * s[0], s, 0.0)
    largest = s if top is None else s[:top]
    gram = jacobian @ jacobian.t()
    return {
        "mls": s[0],
        "normalized_mls": x.square().sum() * s[0] ** 2,
        "input_invariant_mls": (jacobian @ torch.diag(x)).square().sum(),
        "log_volume": largest.log().sum(),
        "volume": largest.prod(),
        "local_dimension": gram.trace() ** 2 / (gram @ gram).trace() if s[0] > 0 else torch.zeros_like(s[0]),
    }


def of_data(model, inputs, names, top=None):
    """(place, measure) -> (n,)."""
    samples = []
    for i in range(len(inputs)):
        found = places(model, inputs[i : i + 1], names)
        samples.append({(p, m): v for p, (x, j) in found.items() for m, v in measures(x, j, top).items()})
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
