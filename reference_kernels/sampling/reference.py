"""The unfused reference of sampling."""

from __future__ import annotations

import torch


def sampling_probabilities(
    logits: torch.Tensor,
    temperature: torch.Tensor | float = 1.0,
    top_k: torch.Tensor | int = 0,
    top_p: torch.Tensor | float = 1.0,
    seen: torch.Tensor | None = None,
    penalty: torch.Tensor | float = 1.0,
    compute: torch.dtype = torch.float32,
    seed: int = 0,  # noqa: ARG001 -- so that it takes what the kernel takes
) -> torch.Tensor:
    """The probability of each token of ``logits``, ``(*batch, vocab)``, in ``compute``.

    In this order: a token in ``seen`` (bool, ``(*batch, vocab)``) has its logit divided by ``penalty`` where positive
    and multiplied elsewhere; the ``top_k`` largest stay; of these, from the largest on, each before which less than
    ``top_p`` of their probability at ``temperature`` lies; their probabilities are made to add up to one. Of equal
    logits the one with the lower index comes first, so exactly ``top_k`` stay. The largest always stays; all stay at
    ``top_k <= 0`` and at ``top_p >= 1``. A temperature of 0 is the largest alone. Numbers by row are ``(*batch)``. A
    row with NaN, with ``+inf`` (but at temperature 0) or of nothing but ``-inf`` has no probabilities: it is NaN.
    """
    x = logits.to(compute)
    temperature, top_p, penalty = (
        value.to(compute).unsqueeze(-1) if isinstance(value, torch.Tensor) else x.new_full((1,), value)
        for value in (temperature, top_p, penalty)
    )
    if isinstance(top_k, torch.Tensor):
        top_k = top_k.unsqueeze(-1)
    if seen is not None:
        x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    ordered, order = torch.sort(x, dim=-1, descending=True, stable=True)
    place = torch.arange(x.shape[-1], device=x.device)
    cold = temperature <= 0
    sound = ~x.isnan().any(-1, keepdim=True)

    heat = torch.where(cold, 1.0, temperature)
    p = torch.softmax((ordered - ordered[..., :1]) / heat, dim=-1)
    p = torch.where((top_k > 0) & (place >= top_k), 0.0, p)
    before = torch.cumsum(p, -1) - p
    nucleus = (before < top_p * p.sum(-1, keepdim=True)) | (top_p >= 1) | (place == 0)
    p = torch.where(nucleus, p, 0.0)
    p = p / p.sum(-1, keepdim=True)
    first = (place == 0).to(compute).expand_as(p)
    p = torch.where(cold & (ordered[..., :1] > -torch.inf), first, p)
    p = torch.where(sound, p, torch.nan)
    return torch.zeros_like(p).scatter(-1, order, p)
