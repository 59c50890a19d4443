"""A table of several runs: a row has for every run a value and its ratio to a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...engine.accounting.quantities import unit_for


@dataclass(frozen=True)
class Spread:
    """The smallest and the largest value of a quantity among the ranks."""

    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Return the spread of the known values. None if no rank knows its value."""
        known = [value for value in values if value is not None]
        return cls(min(known), max(known)) if known else None


_GAP = "  "

Quantity = float | Spread | None


@dataclass(frozen=True)
class Cell:
    """A value as text, and how it compares with the baseline (``"0.62×"``, ``"+0.031"``)."""

    value: str = ""
    ratio: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table. A row without cells is the heading of the rows below it."""

    label: str
    cells: tuple[Cell, ...] = ()

    @property
    def heading(self) -> bool:
        return not self.cells


def text_row(label: str, values: Sequence[str | None]) -> Row:
    return Row(label, tuple(Cell(value or "") for value in values))


def plain_row(
    label: str, values: Sequence[float | None], spec: str, baseline: float | None = None, *, difference: bool = False
) -> Row:
    """Make a row of numbers in format ``spec``.

    With a ``baseline``, each number has its ratio to the baseline. With ``difference``, each number
    has its difference from the baseline instead.
    """
    cells = []
    for value in values:
        ratio = ""
        if value is not None and baseline:
            ratio = f"{value - baseline:+{spec}}" if difference else f"{value / baseline:.2f}×"
        cells.append(Cell("" if value is None else format(value, spec), ratio))
    return Row(f"  {label}", tuple(cells))


def bytes_row(
    label: str, values: Sequence[Quantity], baseline: float | None = None, *,
    show_baseline: bool = False, decimal: bool = False, per: str = "",
) -> Row:  # fmt: skip
    """Make a row of bytes in the unit that suits the largest value.

    Units are KiB, MiB …, or kB, MB … if ``decimal``. ``per`` is added to the unit, for example
    "/s". With a ``baseline``, each value has its ratio, and ``show_baseline`` adds the baseline as
    the last cell.
    """
    spreads = [Spread(value, value) if isinstance(value, int | float) else value for value in values]
    largest = max(
        [spread.largest for spread in spreads if spread] + ([baseline or 0] if show_baseline else []), default=0
    )
    scale, name = unit_for(largest, binary=not decimal)
    unit = name + per
    digits = 0 if scale == 1 else 2 if largest < 100 * scale else 1
    cells = []
    for spread in spreads:
        ratio = f"{spread.largest / baseline:.2f}×" if spread and baseline else ""
        cells.append(Cell(_range(spread, scale, digits, unit) if spread else "", ratio))
    if show_baseline:
        cells.append(Cell("" if baseline is None else _range(Spread(baseline, baseline), scale, digits, unit)))
    return Row(f"  {label}", tuple(cells))


def _range(spread: Spread, scale: int, digits: int, unit: str) -> str:
    if not spread.largest:
        return f"0 {unit}"
    smallest, largest = (f"{value / scale:,.{digits}f}" for value in (spread.smallest, spread.largest))
    return f"{largest} {unit}" if smallest == largest else f"{smallest}–{largest} {unit}"


@dataclass(frozen=True)
class Table:
    """A table with rows of cells. ``header`` names every column. Missing cells are empty."""

    header: Sequence[str]
    rows: Sequence[Row]

    def without_empty(self) -> Table:
        """Return the table without rows that are empty and without headings that have no rows."""
        rows: list[Row] = []
        for row in self.rows:
            if row.heading and rows and rows[-1].heading:
                rows.pop()
            if row.heading or any(cell.value for cell in row.cells):
                rows.append(row)
        return Table(self.header, rows[:-1] if rows and rows[-1].heading else rows)

    def without_last_ratios(self) -> Table:
        """Return the table without ratios in the last column, which is the baseline itself."""
        rows = [Row(row.label, (*row.cells[:-1], Cell(row.cells[-1].value))) if row.cells else row for row in self.rows]
        return Table(self.header, rows)

    @property
    def width(self) -> int:
        return max(len(line) for line in self.text().splitlines())

    def text(self) -> str:
        """Return the table as text, with aligned columns and ratios to the right of values."""
        columns = range(len(self.header))
        cells = [self._filled(row) for row in self.rows if not row.heading]
        ratios = [max(len(row[column].ratio) for row in cells) for column in columns]
        values = [
            max(
                [len(row[column].value) for row in cells]
                + [len(self.header[column]) - (ratios[column] and ratios[column] + 1)]
            )
            for column in columns
        ]
        label = max(len(row.label) for row in self.rows)
        lines = [" " * label + "".join(_GAP + self._right(self.header[c], "", values[c], ratios[c]) for c in columns)]
        for row in self.rows:
            filled = self._filled(row)
            shown = (self._right(filled[c].value, filled[c].ratio, values[c], ratios[c]) for c in columns)
            lines.append(f"{row.label:<{label}}" + "".join(_GAP + cell for cell in shown))
        return "\n".join(line.rstrip() for line in lines)

    def markdown(self) -> str:
        header = [_escaped(name) for name in self.header]
        lines = ["| | " + " | ".join(header) + " |", "|---|" + "---:|" * len(header)]
        for row in self.rows:
            label = (
                f"**{row.label}**"
                if row.heading
                else "&nbsp;" * (len(row.label) - len(row.label.lstrip())) + row.label.strip()
            )
            cells = (f"{cell.value} ({cell.ratio})" if cell.ratio else cell.value for cell in self._filled(row))
            lines.append(f"| {_escaped(label)} | " + " | ".join(map(_escaped, cells)) + " |")
        return "\n".join(lines)

    def _filled(self, row: Row) -> list[Cell]:
        return [*row.cells, *[Cell()] * (len(self.header) - len(row.cells))]

    @staticmethod
    def _right(value: str, ratio: str, value_width: int, ratio_width: int) -> str:
        if not ratio_width:
            return f"{value:>{value_width}}"
        if len(value) > value_width:  # a header may reach over the ratios
            return f"{value:<{value_width + 1 + ratio_width}}"
        return f"{value:>{value_width}} {ratio:>{ratio_width}}"


def _escaped(text: str) -> str:
    """Return ``text`` for a cell of Markdown, which a bar in the name of a run would end."""
    return text.replace("|", "\\|")
