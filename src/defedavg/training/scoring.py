"""What the outputs of a model are worth: losses of samples, correct classifications, and the task's own metric."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import UserError
from ..tasks import Task, cross_entropy
from ..tasks.model_calls import describe

aten = torch.ops.aten
IGNORED = -100  # a target without a loss, by default in PyTorch


def sample_losses(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every sample, or raise ``UserError`` if the loss does not have one value per sample."""
    if not isinstance(outputs, Tensor):  # known only now where the output differs between training and evaluation
        raise UserError(f"the model returns {type(outputs).__name__}; pick the logits with make_task(logits=…)")
    losses = task.loss(outputs, targets)
    if not isinstance(losses, Tensor):
        raise UserError(f"the loss returns {type(losses).__name__}; it must return a tensor with one value per sample")
    if losses.shape != (len(targets),):
        raise UserError(
            f"the loss has shape {tuple(losses.shape)} for {len(targets)} samples; it must return one value per sample "
            "(reduction='none')"
        )
    return losses


def output_gradient(task: Task, outputs: Tensor, targets: Tensor, size: int) -> Tensor:
    """Return the gradient with respect to the outputs, of the sum of mean losses of clients with ``size`` samples each.

    For the cross-entropy, the operations are those of autograd, without its cost.
    """
    if task.loss is cross_entropy and outputs.ndim == 2 and targets.ndim == 1 and targets.dtype == torch.int64:
        logs = torch.log_softmax(outputs, 1)
        each = outputs.new_full((), 1.0 / size)
        grad = aten.nll_loss_backward.default(each.expand(targets.shape[0]), logs, targets, None, 0, IGNORED, each)
        found: Tensor = aten._log_softmax_backward_data.default(grad, logs, 1, outputs.dtype)
        return found
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        loss = sample_losses(task, leaf, targets).view(-1, size).mean(dim=1).sum()
        return torch.autograd.grad(loss, leaf)[0]


def check_outputs(task: Task, outputs: Tensor, targets: Tensor) -> None:
    """Refuse outputs from which the accuracy cannot be computed."""
    classes = task.classes
    if classes is None or task.metric is not None or not isinstance(outputs, Tensor):
        return
    if outputs.ndim != 2 or outputs.shape[1] < classes or targets.ndim != 1:
        raise UserError(
            f"accuracy needs outputs of shape (samples, {classes}) and one target per sample, not "
            f"{tuple(outputs.shape)} and {tuple(targets.shape)}; change the model, or make the task with classes=None"
        )


def hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return which samples are classified correctly; outputs that are NaN name no class."""
    return (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)


def own_metric(task: Task, outputs: Tensor, targets: Tensor) -> float | None:
    """Return the value of the metric that the task itself brings, for all samples together; None if not finite."""
    assert task.metric is not None
    try:
        found = torch.as_tensor(task.metric(outputs, targets), dtype=torch.float64)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"the metric {task.metric_name} fails: {describe(error)}") from error
    if found.ndim > 0 and found.shape != (len(targets),):
        shape = tuple(found.shape)
        raise UserError(f"the metric {task.metric_name} has shape {shape}; it must return one number or one per sample")
    value = float(found.mean())
    return value if math.isfinite(value) else None
