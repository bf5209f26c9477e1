"""What a whole run says: how often `bpk` is fastest, by how much, and where a peer is ahead."""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

from benchmarks.problems import KNOWN
from benchmarks.row import BPK, Row, peers_of

NOISE = 1.03
"""By how much two ratios may differ and count as the same."""

HEAD = [
    "network",
    "rows with a peer",
    "fastest (kept / freed)",
    "BackPACK / bpk",
    "fastest peer / bpk",
    "a peer is ahead in",
]


def overview(rows: Iterable[Row]) -> list[list[str]]:
    """A table with one line for each network, and one for all; `/` are geometric means, with fields kept."""
    by_title: dict[str, list[Row]] = {}
    for row in rows:
        if row.cells[BPK.name].ratio is not None and peers_of(row):
            by_title.setdefault(KNOWN[row.problem].title + f", N={row.batch}", []).append(row)
    every = [row for group in by_title.values() for row in group]
    lines = [line(title, group) for title, group in by_title.items()]
    return [HEAD, *lines, [*line("all", every)[:-1], ""]] if lines else [HEAD]


def line(title: str, rows: list[Row]) -> list[str]:
    """The line of one network."""
    kept = [lead(row) for row in rows]
    freed = [lead(row, freed=True) for row in rows if row.cells[BPK.name].freed is not None and peers_of(row, True)]
    over = [
        cell.ratio / own for row in rows if (cell := row.cells.get("backpack")) and cell.ratio and (own := own_of(row))
    ]
    fastest = f"{sum(x * NOISE >= 1 for x in kept)} / {sum(x * NOISE >= 1 for x in freed)}"
    behind = [behind_in(row) for row, x in zip(rows, kept, strict=True) if x * NOISE < 1]
    return [title, str(len(rows)), fastest, mean(over), mean(kept), ", ".join(behind)]


def own_of(row: Row, freed: bool = False) -> float:
    """The ratio of `bpk` to plain."""
    own = row.cells[BPK.name]
    ratio = own.freed if freed else own.ratio
    assert ratio is not None
    return ratio


def lead(row: Row, freed: bool = False) -> float:
    """The ratio of the fastest peer over that of `bpk`."""
    return min(peers_of(row, freed).values()) / own_of(row, freed)


def behind_in(row: Row) -> str:
    """A row in which a peer is ahead: `KFAC 2.0 (backpack 1.5)`."""
    peers = peers_of(row)
    name = min(peers, key=peers.__getitem__)
    return f"{row.quantity} {own_of(row):.2g} ({name} {peers[name]:.2g})"


def mean(ratios: list[float]) -> str:
    """The geometric mean as text."""
    return f"{exp(sum(map(log, ratios)) / len(ratios)):.2f}" if ratios else "–"
