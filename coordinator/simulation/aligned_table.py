"""A table as aligned text: what commands and benchmarks print, and what may be pasted where a font has one width."""

from collections.abc import Sequence

_GAP = "  "


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lays out cells in columns: the first to the left, all others to the right, with a line below the head.

    Args:
      head: a title for each column.
      rows: the cells of each row, as many as there are titles.

    Returns:
      The lines, without an end of line after the last.

    Raises:
      ValueError: a row has another number of cells.
    """
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"The table has {len(head)} columns, and a row has {len(row)} cells: {list(row)}.")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    ruler = ["-" * width for width in widths]
    return "\n".join(_line(cells, widths) for cells in (head, ruler, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return _GAP.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()
