"""Short convolution: each channel is weighted with its own last few values, then SiLU.

    y_t = silu(sum_{i < W} weight_i * x_{t-W+1+i})        x before the first token is 0

Used on queries, keys and values before the recurrence (Mamba, arXiv 2312.00752; DeltaNet).

Sizes: B batch, T tokens, C channels, W width, N sequences (N = B, or the packed documents).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gla.layers.packing import document_of_token
from gla.ops import forms


class ShortConvolution(nn.Module):
    """Depthwise causal convolution with a state of the last W - 1 inputs.

    Args:
        channels: C.
        width: W, at least 1.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from U(-1/sqrt(W), 1/sqrt(W)), as ``nn.Conv1d`` does."""
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def init_state(
        self,
        batch_size: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Zeros [N, W-1, C], fp32 or wider."""
        width, channels = self.weight.shape
        wide = torch.promote_types(dtype or self.weight.dtype, torch.float32)
        device = device or self.weight.device
        return torch.zeros(batch_size, width - 1, channels, device=device, dtype=wide)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        fused: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Convolve T tokens.

        Args:
            x: [B, T, C].
            state: [N, W-1, C] the inputs before the first token; zeros if None.
            cu_seqlens: [N+1] offsets of documents packed into one row (B = 1).
            fused: by the Triton kernel.

        Returns:
            y [B, T, C] in the dtype of x, and the state after the last token, fp32 or wider.

        Raises:
            ValueError: ``fused`` where the kernels do not take x, in the words of the op.
        """
        if fused:
            forms.resolve("triton", x.shape[1], x.device, (x.dtype, x.dtype))
            return torch.ops.gla_kernels.short_convolution(x, self.weight, state, cu_seqlens)
        T, history = x.shape[1], self.weight.shape[0] - 1
        wide = torch.promote_types(x.dtype, torch.float32)
        if cu_seqlens is None:
            state = self.init_state(x.shape[0], x.device, x.dtype) if state is None else state
            padded = torch.cat([state.to(x.dtype), x], dim=1)
            return self._weigh(padded), padded[:, T:].to(wide)
        # Each document gets its W - 1 earlier inputs in front, so that no window spans two of them.
        documents = cu_seqlens.shape[0] - 1
        n = torch.arange(documents, device=x.device)
        token = document_of_token(cu_seqlens, T) * history + torch.arange(T, device=x.device)
        past = torch.arange(history, device=x.device) + n.unsqueeze(1) * history
        padded = x.new_zeros(T + documents * history, x.shape[2])
        padded = padded.index_copy(0, token + history, x[0])
        if state is not None:
            before = (past + cu_seqlens[:-1].unsqueeze(1)).flatten()
            padded = padded.index_copy(0, before, state.flatten(0, 1).to(x.dtype))
        after = padded[past + cu_seqlens[1:].unsqueeze(1)]
        return self._weigh(padded.unsqueeze(0))[:, token], after.to(wide)

    def _weigh(self, padded: Tensor) -> Tensor:
        """[B, T + W-1, C] -> [B, T, C]."""
        width = self.weight.shape[0]
        T = padded.shape[1] - width + 1
        y = padded[:, :T] * self.weight[0]
        for i in range(1, width):
            y = y + padded[:, i : i + T] * self.weight[i]
        return F.silu(y).to(padded.dtype)
