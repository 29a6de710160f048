"""AsySG: asynchronous stochastic gradient, one mini-batch gradient per message.

Lian, Huang, Li, Liu: Asynchronous Parallel Stochastic Gradient for Nonconvex Optimization (NeurIPS 2015).

    as soon as n gradients have arrived:  w[t+1] = w[t] − η · (1/n) Σ g

It is DeFedAvg-IID with K = 1, and Δ is the gradient itself: there is no local rate.
"""

from __future__ import annotations

from .defedavg_iid import DeFedAvgIID


class AsySG(DeFedAvgIID):
    """DeFedAvg-IID with one local step of rate 1."""

    name = "asysg"
    summary = "asynchronous SGD: single gradients, merged n at a time"
    citation = "Lian et al., NeurIPS 2015"
    equation = "w[t+1] = w[t] − η/n Σ g, one step per job"
    uses_local_lr = False
    uses_local_steps = False

    @classmethod
    def steps_per_job(cls, local_steps: int) -> int:  # noqa: ARG003 (overrides a hook)
        """Return 1: a job computes one gradient."""
        return 1
