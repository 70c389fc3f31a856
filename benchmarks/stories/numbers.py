"""Numbers in words, and the sums that stories tell: what is bought, what remains, what is shared."""

from __future__ import annotations

from benchmarks.stories.draw import Draw
from benchmarks.stories.vocabulary import Row, vocabulary


def in_words(number: int) -> str:
    """A whole number from 0 to 99.

    Example:
        >>> in_words(42)
        'forty-two'
    """
    assert 0 <= number < 100, "stories count no further"
    small, tens = vocabulary().words["small_number"].items, vocabulary().words["tens"].items
    if number < len(small):
        return small[number]
    ten, one = tens[number // 10 - 2], number % 10
    return f"{ten}-{small[one]}" if one else ten


def draw_sums(draw: Draw, *, age: int, digits: bool) -> Row:
    """The numbers of one story, in words or in digits. All are 2 or more, so that what they count is plural.

    A purse: `have` - `first` = `mid`, `mid` - `second` = `left`, `left` - `given` = `after`, `first` + `second` =
    `spent`. A harvest: `rows` x `each` = `total` = `people` x `portion`. A price and what is `less` than it; an age
    and the `older` one of the next year.
    """
    first, second, given, after = (draw.between(2, 9) for _ in range(4))
    rows, each = draw.between(2, 9), draw.between(2, 9)
    people = draw.one_of([part for part in range(2, 10) if rows * each % part == 0 and rows * each // part > 1])
    left = given + after
    values = {
        "have": first + second + left,
        "first": first,
        "mid": second + left,
        "second": second,
        "spent": first + second,
        "left": left,
        "given": given,
        "after": after,
        "rows": rows,
        "each": each,
        "total": rows * each,
        "people": people,
        "portion": rows * each // people,
        "price": draw.between(10, 40),
        "less": draw.between(2, 9),
        "older": age + 1,
    }
    return {key: str(value) if digits else in_words(value) for key, value in values.items()}
