"""Next-token cross-entropy from hidden states, without keeping the logits.

The logits of 2,048 tokens over 32,000 words are 262 MB in fp32, and the usual loss holds several copies. Here they live
one chunk at a time: the forward pass computes a chunk's loss and, since the loss is a plain sum, its gradient with it,
so the backward pass recomputes nothing. Positions without a label cost nothing. (The idea is Liger Kernel's fused
linear cross-entropy, arXiv 2410.10989.)
"""

import types

import torch
from torch import nn
from transformers import PreTrainedModel

CHUNK_TOKENS = 2048


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross-entropy of `hidden @ weight.T` against `labels`."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        """hidden [T, H], weight [V, H], labels [T]; returns a scalar in fp32."""
        if torch.is_autocast_enabled(hidden.device.type):
            compute = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(compute), weight.to(compute)
        needs_grad = any(ctx.needs_input_grad)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        for start in range(0, hidden.size(0), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            logits = (hidden[rows] @ weight.T).float()
            target = labels[rows].unsqueeze(1)
            normalizer = logits.logsumexp(dim=1, keepdim=True)
            total += (normalizer - logits.gather(1, target)).sum()
            if needs_grad:
                grad = logits.sub_(normalizer).exp_()
                grad.scatter_add_(1, target, grad.new_full((1, 1), -1.0).expand_as(target))
                grad = grad.to(hidden.dtype)
                torch.mm(grad, weight, out=grad_hidden[rows])
                grad_weight.addmm_(grad.T, hidden[rows])
                del grad
            del logits  # or this chunk's would be there beside the next one's
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad_total):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_total, grad_weight * grad_total, None


def attach_summed_loss(model: PreTrainedModel) -> None:
    """Let `model(..., labels=labels, summed_loss=True)` return the summed loss of all labelled next tokens, an fp32
    scalar.

    The head itself computes it, in its own forward, since FSDP makes a module's weight whole around that alone. Every
    other call of the model or the head is as before.
    """
    head = model.get_output_embeddings()
    project, run = head.forward, model.forward

    def head_forward(self, hidden, targets=None):
        return project(hidden) if targets is None else _LinearCrossEntropy.apply(hidden, self.weight, targets)

    def forward(self, *args, summed_loss=False, **kwargs):
        if not summed_loss:
            return run(*args, **kwargs)
        targets = kwargs.pop("labels")[:, 1:]
        hidden = self.base_model(*args, **kwargs, use_cache=False).last_hidden_state[:, :-1]
        labelled = targets != -100
        # Looked up here and not above: FSDP may have wrapped it.
        return self.get_output_embeddings()(hidden[labelled], targets=targets[labelled])

    head.forward = types.MethodType(head_forward, head)
    model.forward = types.MethodType(forward, model)


def supports_summed_loss(model: PreTrainedModel) -> bool:
    """Whether the head is a plain bias-free projection without scaling or soft-capping of its logits."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    scaled = any(
        getattr(config, key, None) not in (None, 1.0)
        for key in (
            "final_logit_softcapping",
            "logit_scale",
            "logits_scaling",
            "output_multiplier",
            "lm_head_multiplier",
        )
    )
    return isinstance(head, nn.Linear) and head.bias is None and not scaled
