"""The two classes of FlashInfer that we use, in plain torch, as version 0.7.4 documents them.

They take the arguments that we pass, by the names of the library, and refuse what its documentation excludes. They
do not show that the library's kernels compute the same: `bench/gpu.sh flashinfer` does, on a GPU.
"""

import torch
from torch import Tensor

from tests.kernels.paged import attend

PACKAGE = "flashinfer-python"


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.num_plans = 0

    def _plan(self, starts: Tensor, pages: Tensor, last_lengths: Tensor, sizes: tuple[int, ...]) -> None:
        assert {starts.dtype, pages.dtype, last_lengths.dtype} == {torch.int32}
        assert len(starts) == len(last_lengths) + 1
        assert starts[0] == 0
        assert starts[-1] == len(pages)
        assert (starts.diff() > 0).all()
        assert (last_lengths >= 1).all()
        assert (last_lengths <= sizes[3]).all()
        self._contexts = [
            (pages[first:end], (int(end - first) - 1) * sizes[3] + int(last))
            for first, end, last in zip(starts[:-1], starts[1:], last_lengths, strict=True)
        ]
        self._sizes = sizes
        self.num_plans += 1

    def _context(self, number: int, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [length, G, D] of a sequence, as stored."""
        pages, length = self._contexts[number]
        keys, values = (each[pages.long()].float().transpose(1, 2).flatten(0, 1)[:length] for each in cache)
        return keys, values

    def _check(self, q: Tensor, cache: tuple[Tensor, Tensor], *, uses_dependent_launch: bool) -> None:
        assert not uses_dependent_launch, "our kernels would not wait for what they read"
        num_heads, num_groups, head_dim, page_size = self._sizes
        assert q.is_contiguous()
        assert q.shape[1:] == (num_heads, head_dim)
        assert cache[0].shape[1:] == cache[1].shape[1:] == (num_groups, page_size, head_dim)


class BatchPrefillWithCausalBidirectionalRangesWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._types = (q_data_type, kv_data_type)
        self._head_dims = (head_dim_qk, head_dim_vo)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
    ) -> None:
        assert self._head_dims == (head_dim_qk, head_dim_qk)
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._plan(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, sizes)
        assert qo_indptr.dtype == torch.int32
        self._starts = qo_indptr.tolist()
        assert len(self._starts) == len(paged_kv_indptr)

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], bidirectional_ranges: Tensor, *, enable_pdl: bool
    ) -> Tensor:
        self._check(q, paged_kv_cache, uses_dependent_launch=enable_pdl)
        assert (q.dtype, paged_kv_cache[0].dtype) == self._types
        assert bidirectional_ranges.dtype == torch.int32
        assert bidirectional_ranges.is_contiguous()
        assert bidirectional_ranges.shape == (len(q), 2) == (self._starts[-1], 2)
        rows = []
        for number, (first, end) in enumerate(zip(self._starts[:-1], self._starts[1:], strict=True)):
            keys, values = self._context(number, paged_kv_cache)
            for row in range(first, end):
                position = len(keys) - (end - row)
                start, last = bidirectional_ranges[row].tolist()
                seen = [place for place in range(len(keys)) if place <= position or start <= place <= last]
                rows.append(attend(q[row].float(), keys[seen], values[seen]))
        return torch.stack(rows).to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self._plan(indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim, page_size))
        self._types = (q_data_type, kv_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, enable_pdl: bool) -> Tensor:
        self._check(q, paged_kv_cache, uses_dependent_launch=enable_pdl)
        assert (q.dtype, paged_kv_cache[0].dtype) == self._types
        assert len(q) == len(self._contexts)
        rows = [attend(row.float(), *self._context(number, paged_kv_cache)) for number, row in enumerate(q)]
        return torch.stack(rows).to(q.dtype)
