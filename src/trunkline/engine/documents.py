"""Packed documents: the first token of each, read from the arguments of a forward, which must agree.

Documents never attend to each other, and no document is trained to predict the first token of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ARGUMENTS = ("document_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

Starts = tuple[int, ...]
_ONE: tuple[Starts, ...] = ((0,),)  # one document in each row


class Documents(NamedTuple):
    """The documents of a batch.

    Attributes:
        starts: first tokens of documents, for each row, or once where all rows are alike. In a batch with several
            documents, a row's padding is a document, too.
        position_ids: (1, S) or (B, S); None for 0 … S-1.
    """

    starts: tuple[Starts, ...]
    position_ids: Tensor | None


def read(given: dict[str, Any], ids_BS: Tensor, lengths_B: Tensor | None) -> Documents:
    """Read the documents of a batch.

    Args:
        given: arguments of a forward, by name. Read are `document_ids`, `seq_idx`, `cu_seq_lens_q`, `cu_seq_lens_k`,
            and `position_ids`, in which a document begins at each 0 if no other argument names the documents.
        ids_BS: token ids.
        lengths_B: tokens of each row that are not padding; None without padding.

    Returns:
        The documents. Their position ids are as given, or begin at 0 in each document; padding has positions of real
        tokens. Without any of these arguments a row is one document.

    Raises:
        ValueError: an argument is of the wrong shape, or two contradict each other.
    """
    num_rows, seq_len = ids_BS.shape
    lengths = None if lengths_B is None else lengths_B.tolist()
    positions = _positions(given.get("position_ids"), ids_BS)
    said: dict[str, tuple[Starts, ...]] = {}
    for name in ("document_ids", "seq_idx"):
        if given.get(name) is not None:
            said[name] = _of_ids(name, given[name], ids_BS, lengths)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if given.get(name) is not None:
            said[name] = _of_lengths(name, given[name], ids_BS)
    if positions is not None and positions.device.type != "meta":
        _check_rising(positions, lengths, num_rows, next(iter(said.items()), None))
        if not said:
            said["position_ids"] = _of_positions(positions, lengths, num_rows)
    if not said:
        return Documents(_ONE, positions)
    name, starts = next(iter(said.items()))
    for other, found in said.items():
        if _each(found, num_rows) != _each(starts, num_rows):
            raise ValueError(f"{name} and {other} say that documents begin at different tokens: leave one of them out.")
    if positions is None:
        positions = None if starts == _ONE else _restarting(starts, seq_len, ids_BS.device)
    elif lengths is not None:
        positions = _without_padding(positions, lengths, num_rows, packed=starts != _ONE)
    if lengths is not None and starts != _ONE:  # what is behind the last token is no part of a document
        rows = zip(_each(starts, num_rows), lengths, strict=True)
        starts = tuple(
            (*(at for at in row if at < length), *((length,) if length < seq_len else ())) for row, length in rows
        )
    return Documents(_once(starts), positions)


def without_last(targets: Tensor, starts: Sequence[Starts], ignore: int) -> Tensor:
    """Return targets (B, S-1) with `ignore` at the last token of each document, which predicts nothing.

    Args:
        targets: targets of positions 0 … S-2; they are not changed.
        starts: first tokens of documents, for each row, or once for all rows.
        ignore: value of a target that is none.
    """
    if tuple(starts) == _ONE:
        return targets
    targets = targets.clone()
    for row, each in enumerate(starts):
        at = torch.tensor([start - 1 for start in each if 0 < start <= targets.shape[1]], device=targets.device)
        targets[slice(None) if len(starts) == 1 else row, ..., at.long()] = ignore
    return targets


def within(starts: Sequence[Starts], seq_len: int) -> tuple[Starts, ...]:
    """Return the starts of documents in rows that are cut to `seq_len` tokens."""
    return _once(tuple(tuple(start for start in each if start < seq_len) for each in starts))


def _once(starts: tuple[Starts, ...]) -> tuple[Starts, ...]:
    """Return one row's starts where all rows are alike."""
    return starts[:1] if len(set(starts)) == 1 else starts


def _each(starts: tuple[Starts, ...], num_rows: int) -> tuple[Starts, ...]:
    return starts * num_rows if len(starts) == 1 else starts


def _positions(positions: Any, ids_BS: Tensor) -> Tensor | None:
    num_rows, seq_len = ids_BS.shape
    if positions is None:
        return None
    if not isinstance(positions, Tensor):
        raise ValueError(
            f"position_ids must be a tensor of shape {tuple(ids_BS.shape)}, not {type(positions).__name__}."
        )
    if positions.is_floating_point():
        raise ValueError(f"position_ids must be whole numbers, not {positions.dtype}.")
    shape = tuple(positions.shape)
    if positions.ndim == 3 and shape[0] in (3, 4):  # of text, and of time, height and width, which text has alike
        if not bool((positions == positions[:1]).all()):
            raise ValueError(
                "position_ids of three dimensions differ between their planes, as they do for images: only text can be "
                "streamed."
            )
        positions, shape = positions[0], shape[1:]
    if shape not in ((seq_len,), (1, seq_len), (num_rows, seq_len)):
        raise ValueError(f"position_ids must be of shape {tuple(ids_BS.shape)} or {(1, seq_len)}, not {shape}.")
    rows: Tensor = positions.reshape(-1, seq_len).to(ids_BS.device)
    return rows


def _breaks(positions: Tensor, lengths: list[int] | None, num_rows: int) -> Tensor:
    """Return where positions do not rise by 1 from the token before, (1, S - 1) or (B, S - 1), on the CPU."""
    breaks = (positions.diff(dim=1) != 1).cpu()
    if lengths is None:
        return breaks
    real = torch.arange(1, positions.shape[1]) < torch.tensor(lengths)[:, None]  # whatever padding has
    return breaks.expand(num_rows, -1) & real


def _of_positions(positions: Tensor, lengths: list[int] | None, num_rows: int) -> tuple[Starts, ...]:
    """Return the starts of documents from position ids; a document begins where they do not rise by 1."""
    breaks = _breaks(positions, lengths, num_rows)
    return _once(tuple((0, *(row.nonzero().flatten() + 1).tolist()) for row in breaks))


def _check_rising(
    positions: Tensor, lengths: list[int] | None, num_rows: int, known: tuple[str, tuple[Starts, ...]] | None
) -> None:
    """Refuse positions that do not rise by 1 within a document; without `known` documents one begins at each 0."""
    breaks = _breaks(positions, lengths, num_rows)
    if known is None:
        wrong = breaks & ~(positions[:, 1:] == 0).cpu()
        fix = (
            "they must rise by 1 within a document, and begin at 0 in the next. Where they go on in the next document "
            "pass document_ids, too, a number for each token's document"
        )
    else:
        name, starts = known
        wrong = breaks.expand(num_rows, -1).clone()
        for row, each in enumerate(_each(starts, num_rows)):
            wrong[row, [start - 1 for start in each[1:]]] = False
        fix = f"within a document of {name} they must rise by 1"
    if bool(wrong.any()):
        row, at = (int(x) for x in wrong.nonzero()[0])
        before, after = (int(x) for x in positions[min(row, len(positions) - 1), at : at + 2])
        raise ValueError(f"position_ids go from {before} to {after} at token {at + 1}: {fix}.")


def _without_padding(positions: Tensor, lengths: list[int], num_rows: int, *, packed: bool) -> Tensor:
    """Replace the positions of padding by positions of real tokens, so that padding cannot change the result."""
    places = torch.arange(positions.shape[1], device=positions.device)
    if not packed and bool((positions[:, 0] == positions[0, 0]).all()):
        return positions[:1, :1] + places
    real = places < torch.tensor(lengths, device=positions.device)[:, None]
    return positions.expand(num_rows, -1).where(real, positions[:, :1])


def _of_ids(name: str, ids: Any, ids_BS: Tensor, lengths: list[int] | None) -> tuple[Starts, ...]:
    """Return the starts of documents from document ids; a document is a run of equal ids."""
    num_rows, seq_len = ids_BS.shape
    shapes = ((seq_len,), (1, seq_len), (num_rows, seq_len))
    if not isinstance(ids, Tensor) or ids.is_floating_point() or tuple(ids.shape) not in shapes:
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"{name} must be whole numbers of shape {tuple(ids_BS.shape)}, one for each token's document; got {got}."
        )
    rows = ids.reshape(-1, seq_len).cpu()
    rows = rows if lengths is None else rows.expand(num_rows, -1)
    found = []
    for row, numbers in enumerate(rows):
        numbers = numbers if lengths is None else numbers[: lengths[row]]
        starts = (0, *(numbers.diff().nonzero().flatten() + 1).tolist())
        if len(numbers.unique()) < len(starts) and len(numbers):
            raise ValueError(
                f"{name} comes back to a number in row {row}: the tokens of a document stand together, and padding is "
                "marked by attention_mask, or by a number of its own."
            )
        found.append(starts)
    return _once(tuple(found))


def _of_lengths(name: str, ends: Any, ids_BS: Tensor) -> tuple[Starts, ...]:
    """Return the starts of documents from cumulative lengths."""
    num_rows, seq_len = ids_BS.shape
    if num_rows != 1:
        raise ValueError(f"{name} is of one row, and input_ids has {num_rows}: pass document_ids.")
    values = ends.flatten().tolist() if isinstance(ends, Tensor) else list(ends)
    if values[:1] != [0] or values[-1] != seq_len or sorted(set(values)) != values:
        raise ValueError(
            f"{name} must rise from 0 to {seq_len}, the tokens of input_ids, with no document empty: where each "
            f"begins, and where the last ends, not how long they are; got {values[:8]}."
        )
    return (tuple(values[:-1]),)


def _restarting(starts: tuple[Starts, ...], seq_len: int, device: torch.device) -> Tensor:
    """Return positions that begin at 0 in each document."""
    rows = []
    for each in starts:
        lengths = torch.tensor([*each, seq_len]).diff()
        rows.append(torch.arange(seq_len) - torch.tensor(each).repeat_interleave(lengths))
    return torch.stack(rows).to(device)
