"""A matrix of what a tensor holds, copied only where its columns are not neighbours."""

from __future__ import annotations

import torch

from pymesh3d.triton_kernels.rows import as_rows


def test_neighbouring_columns_are_not_copied() -> None:
    x = torch.arange(48).view(2, 3, 8)
    for view, shape in ((x, (6, 8)), (x[0, :, :5], (3, 5)), (x[0, 0], (1, 8))):
        rows = as_rows(view)
        assert rows.shape == shape and rows.data_ptr() == x.data_ptr()
        assert torch.equal(rows.view(view.shape), view)


def test_columns_are_neighbours_where_there_are_no_rows() -> None:
    rows = as_rows(torch.zeros(6, 3, 2).permute(1, 2, 0)[:0])
    assert (rows.shape, rows.stride()) == ((0, 6), (6, 1))


def test_others_are() -> None:
    x = torch.arange(48).view(2, 3, 8)
    for view in (x.transpose(1, 2), x[..., ::2], x[:, :, :1].expand(2, 3, 4), x[0, 0, None].t()):
        rows = as_rows(view)
        assert rows.stride(1) == 1 and rows.data_ptr() != x.data_ptr()
        assert torch.equal(rows.view(view.shape), view)
