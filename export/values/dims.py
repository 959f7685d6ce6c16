"""Dimensions as integer polynomials, so that "p + s" equals "s + p" and "4*b" divides by 4."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Mapping

Monomial = tuple[str, ...]


class Dim:
    """A polynomial with integer coefficients over named sizes; immutable and hashable.

    Two dimensions compare equal only if they are equal for every value of the names. Names that
    stand for something more involved ("Min(32, s)") are atoms, equal to themselves alone.
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms = {m: c for m, c in sorted(terms.items()) if c}
        self._hash = hash(tuple(self.terms.items()))

    @staticmethod
    def of(value: int | Dim) -> Dim:
        return value if isinstance(value, Dim) else Dim({(): int(value)})

    @staticmethod
    def atom(name: str) -> Dim:
        return Dim({(name,): 1})

    @staticmethod
    def parse(text: str) -> Dim:
        """The polynomial that `text` spells; an atom if it cannot be read as one."""
        return _parse(text)

    @property
    def value(self) -> int | None:
        """The number, when there are no names in it."""
        if not self.terms:
            return 0
        return self.terms.get(()) if set(self.terms) == {()} else None

    @property
    def atoms(self) -> set[str]:
        return {name for monomial in self.terms for name in monomial}

    def __add__(self, other: int | Dim) -> Dim:
        terms = dict(self.terms)
        for monomial, count in Dim.of(other).terms.items():
            terms[monomial] = terms.get(monomial, 0) + count
        return Dim(terms)

    def __neg__(self) -> Dim:
        return Dim({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: int | Dim) -> Dim:
        return self + -Dim.of(other)

    def __mul__(self, other: int | Dim) -> Dim:
        terms: dict[Monomial, int] = {}
        for m, c in self.terms.items():
            for n, d in Dim.of(other).terms.items():
                product = tuple(sorted((*m, *n)))
                terms[product] = terms.get(product, 0) + c * d
        return Dim(terms)

    def divided_by(self, other: int | Dim) -> Dim | None:
        """The quotient when it is exact for every value of the names, else None."""
        divisor = Dim.of(other)
        if len(divisor.terms) == 1:
            ((monomial, count),) = divisor.terms.items()
            terms = {}
            for m, c in self.terms.items():
                rest = _without(m, monomial)
                if rest is None or c % count:
                    return None
                terms[rest] = c // count
            return Dim(terms)
        return self._divided_by_sum(divisor)

    def _divided_by_sum(self, divisor: Dim) -> Dim | None:
        """Long division, highest monomials first: in an exact quotient each step takes the highest one away."""
        if not divisor.terms:
            return None
        first, rest, quotient = _highest(divisor), self, Dim.of(0)
        while rest.terms:
            step = Dim({m: c for m, c in rest.terms.items() if m == _highest(rest)}).divided_by(
                Dim({first: divisor.terms[first]})
            )
            if step is None:
                return None
            quotient, rest = quotient + step, rest - step * divisor
        return quotient

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.value == other
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for monomial, count in reversed(self.terms.items()):
            factors = [*([] if count == 1 and monomial else [str(count)]), *monomial]
            parts.append("*".join(factors))
        return " + ".join(parts)

    __repr__ = __str__


def _highest(dim: Dim) -> Monomial:
    """The monomial with the most factors; among equally many, one chosen so that products keep the order."""
    return min(dim.terms, key=lambda monomial: (-len(monomial), monomial))


def product(dims: Iterable[Dim]) -> Dim:
    """The product of `dims`; 1 for none."""
    return functools.reduce(Dim.__mul__, dims, Dim.of(1))


def is_positive_or_zero(number: Dim) -> bool:
    """Whether a number is proved not to be negative: a sum of sizes, none of them subtracted.

    Names of sizes are not negative. Those that begin with "@" stand for any number.
    """
    return all(count > 0 for count in number.terms.values()) and not any(
        name.startswith("@") or "-" in name for name in number.atoms
    )


def minimum(a: Dim, b: Dim) -> Dim:
    """The smaller of two numbers; where that is not known an atom "Min(c, x)" of two that subtract nothing."""
    for small, large in ((a, b), (b, a)):
        if is_positive_or_zero(large - small):
            return small
    monomials = {*a.terms, *b.terms}
    lacking = {m: -min(a.terms.get(m, 0), b.terms.get(m, 0), 0) for m in monomials}
    shift = Dim(lacking)
    return Dim.atom(f"Min({', '.join(sorted((str(a + shift), str(b + shift))))})") - shift


def maximum(a: Dim, b: Dim) -> Dim:
    """The larger of two numbers."""
    return a + b - minimum(a, b)


def equal(a: Dim, b: Dim) -> bool | None:
    """Whether two numbers are equal; None where that is not known. A size never equals a negative number."""
    if a == b:
        return True
    if a.value is not None and b.value is not None:
        return False
    for size, number in ((a, b), (b, a)):
        if number.value is not None and number.value < 0 and all(count > 0 for count in size.terms.values()):
            return False
    return None


def is_clipped(size: Dim, whole: Dim) -> bool:
    """Whether `size` is Min(c, whole) for a number c > 1.

    Such a size broadcasts against `whole` only where it is the same: a table of c positions, cut to
    the sequence, fails for longer sequences.
    """
    match = re.fullmatch(r"Min\((\d+), (.+)\)", str(size))
    return match is not None and int(match[1]) > 1 and Dim.parse(match[2]) == whole


def _without(monomial: Monomial, factors: Monomial) -> Monomial | None:
    rest = list(monomial)
    for factor in factors:
        if factor not in rest:
            return None
        rest.remove(factor)
    return tuple(rest)


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Dim:
    try:
        return _expression(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return Dim.atom(text)


def _expression(node: ast.expr) -> Dim:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Dim.of(node.value)
    if isinstance(node, ast.Name):
        return Dim.atom(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_expression(node.operand)
    if isinstance(node, ast.BinOp):
        left, right = _expression(node.left), _expression(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            quotient = left.divided_by(right)
            return quotient if quotient is not None else Dim.atom(f"({left})//({right})")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        arguments = [_expression(argument) for argument in node.args]
        if node.func.id.lower() in ("min", "max") and len(arguments) == 2:
            return (minimum if node.func.id.lower() == "min" else maximum)(*arguments)
        if not node.keywords:
            return Dim.atom(f"{node.func.id}({', '.join(map(str, arguments))})")
    raise ValueError(ast.dump(node))
