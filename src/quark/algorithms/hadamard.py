"""Orthogonal matrices with entries of one magnitude, for every size that a construction below reaches.

    Sylvester   H(2n) = [[H, H], [H, -H]]
    Paley I     q + 1,     q a prime power, q = 3 mod 4:  I + [[0, 1], [-1, Q]]
    Paley II    2(q + 1),  q a prime power, q = 1 mod 4:  C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]],
                C = [[0, 1], [1, Q]]                       Q_ij = chi(i - j), the quadratic character of GF(q)
    products    H(m) x H(n) is of order mn

18944 = 148 * 128 and 4864 = 76 * 64 are such orders. Other sizes are turned in equal blocks of the largest order that
divides them; a size without a divisor of 4 gets a random orthogonal matrix with a fixed seed.

A ``Rotation`` keeps the factors, so that applying it costs n (n1 + n2 + ..) instead of n^2 operations a vector.
Sources: Paley 1933; Ashkboos et al., "QuaRot", 2024, for the use.
"""

from __future__ import annotations

import itertools
from functools import cache
from math import isqrt, prod, sqrt

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError, known
from quark.numerics.array import Array, Same, as_parameter, is_torch, namespace

LARGEST_KERNEL = 1024  # orders up to which a matrix is constructed at once
SYLVESTER = 64  # factors of powers of two are matrices of up to this size


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix of ``size``: ``size / prod(orders)`` equal blocks, each the Kronecker product of
    ``kernel(order)`` over ``orders``, divided by the root of their product.

    Attributes:
        size: of the vectors that are turned.
        orders: of the factors; empty: a random orthogonal matrix.
        signs: ±1 per element, by which a vector is multiplied first (a random rotation); None: none.
    """

    size: int
    orders: tuple[int, ...]
    signs: tuple[int, ...] | None = None

    def apply(self, x: Array) -> Same:
        """``x`` [.., size] times the matrix, as float of the type of ``x``."""
        if x.shape[-1] != self.size:
            raise ConfigError(f"a rotation of size {self.size} does not fit vectors of {x.shape[-1]}")
        shape = tuple(x.shape)
        if self.signs is not None:
            x = x * like(np.array(self.signs, np.float64), x)
        if not self.orders:
            return x @ like(random_orthogonal(self.size), x)
        x = x.reshape((-1, *self.orders))
        for axis, order in enumerate(self.orders, 1):
            x = along(x, like(kernel(order) / sqrt(order), x), axis)
        return x.reshape(shape)

    def matrix(self) -> np.ndarray:
        """The matrix, float64; ``apply(x)`` is ``x @ matrix()``."""
        return self.apply(np.eye(self.size))

    def apply_transposed(self, x: Array) -> Same:
        """``x`` [.., size] times the transposed matrix: what undoes ``apply``."""
        if not self.orders:
            x = x @ like(random_orthogonal(self.size).T, x)
        else:
            shape = tuple(x.shape)
            x = x.reshape((-1, *self.orders))
            for axis, order in enumerate(self.orders, 1):
                x = along(x, like(kernel(order).T / sqrt(order), x), axis)
            x = x.reshape(shape)
        return x if self.signs is None else x * like(np.array(self.signs, np.float64), x)


def like(matrix: np.ndarray, x: Array) -> Same:
    """``matrix`` in the library, the type and on the device of ``x``."""
    return as_parameter(matrix, x).to(x.dtype) if is_torch(x) else matrix.astype(x.dtype)


def along(x: Array, matrix: Array, axis: int) -> Same:
    """``x`` with the vectors along ``axis`` multiplied by ``matrix`` from the right."""
    xp = namespace(x)
    if axis == x.ndim - 1:
        return x @ matrix
    return xp.moveaxis(xp.moveaxis(x, axis, -1) @ matrix, -1, axis)


def rotation(size: int, block: int | None = None, seed: int | None = None) -> Rotation:
    """The rotation for vectors of ``size``.

    Args:
        size: 1 or more.
        block: turn blocks of this many elements; None: as large as possible.
        seed: of random signs; None: none.

    Raises:
        ConfigError: ``block`` does not divide ``size``, or no construction has its order.
    """
    if block is not None and (block < 1 or size % block):
        divisors = [n for n in range(1, size + 1) if size % n == 0 and factors(n)]
        near = sorted(sorted(divisors, key=lambda n: abs(n - block))[:3])
        raise ConfigError(f"rotation size {block} does not divide {size}; {', '.join(map(str, near))} would")
    orders = factors(size if block is None else block)
    if block is not None and orders is None:
        raise ConfigError(f"no construction of a Hadamard matrix of order {block} is known here; take a divisor")
    if orders is None:
        best = max(n for n in range(1, size + 1) if size % n == 0 and factors(n))
        orders = factors(best) if best >= 4 else ()
    signs = None
    if seed is not None:
        signs = tuple(int(s) for s in np.random.default_rng(seed).choice((-1, 1), size))
    return Rotation(size, orders or (), signs)


@cache
def factors(order: int) -> tuple[int, ...] | None:
    """Orders of constructed matrices whose product is ``order``; None if there are none."""
    odd, twos = order, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    if odd == 1:
        return sylvester(twos)
    for used in range(2, twos + 1):
        if odd << used <= LARGEST_KERNEL and paley(odd << used):
            return (odd << used, *(sylvester(twos - used) if twos > used else ()))
    return None


def sylvester(exponent: int) -> tuple[int, ...]:
    """2**exponent as factors of up to ``SYLVESTER``."""
    largest = SYLVESTER.bit_length() - 1
    return (SYLVESTER,) * (exponent // largest) + (
        (1 << exponent % largest,) if exponent % largest or not exponent else ()
    )


def paley(order: int) -> int:
    """1 or 2 for the construction of Paley that gives ``order``, 0 for none."""
    if order % 4 == 0 and prime_power(order - 1):
        return 1
    return 2 if order % 4 == 0 and (order // 2 - 1) % 4 == 1 and prime_power(order // 2 - 1) else 0


@cache
def kernel(order: int) -> np.ndarray:
    """The matrix of one factor, ±1, int8."""
    if order & (order - 1) == 0:
        out = np.ones((1, 1), np.int8)
        while len(out) < order:
            out = np.block([[out, out], [out, -out]])
        return out
    if paley(order) == 1:
        return np.eye(order, dtype=np.int8) + bordered(order - 1, -1)
    half = order // 2
    plus, minus = np.array([[1, 1], [1, -1]], np.int8), np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(bordered(half - 1, 1), plus) + np.kron(np.eye(half, dtype=np.int8), minus)


def bordered(q: int, sign: int) -> np.ndarray:
    """[[0, 1], [sign, Q]] with the Jacobsthal matrix Q of GF(q)."""
    out = np.ones((q + 1, q + 1), np.int8)
    out[0, 0], out[1:, 0], out[1:, 1:] = 0, sign, jacobsthal(q)
    return out


def jacobsthal(q: int) -> np.ndarray:
    """Q_ij = chi(a_i - a_j): 1 for squares, -1 for others, 0 for 0, in the field of q elements."""
    p, k = known(prime_power(q), f"the prime of {q}")
    elements = np.array(list(itertools.product(range(p), repeat=k)))
    weights = p ** np.arange(k - 1, -1, -1)
    reduce = irreducible(p, k)
    squares = {int(multiply(a, a, p, reduce) @ weights) for a in elements[1:]}
    chi = np.array([0 if n == 0 else 1 if n in squares else -1 for n in range(q)], np.int8)
    difference = (elements[:, None] - elements[None]) % p
    return chi[difference @ weights]


def multiply(a: np.ndarray, b: np.ndarray, p: int, reduce: np.ndarray) -> np.ndarray:
    """The product of two polynomials (highest power first) modulo a monic one, over GF(p)."""
    k = len(a)
    out = np.convolve(a, b) % p
    while len(out) > k:
        out = (out[1:] - out[0] * np.pad(reduce, (0, len(out) - 1 - k))) % p
    return out


@cache
def irreducible(p: int, k: int) -> np.ndarray:
    """The lower coefficients, highest first, of a monic polynomial of degree k that is a product of no others."""
    if k == 1:
        return np.zeros(1, np.int64)
    reducible = set()
    for low in range(1, k // 2 + 1):
        for left in itertools.product(range(p), repeat=low):
            for right in itertools.product(range(p), repeat=k - low):
                reducible.add(tuple((np.convolve((1, *left), (1, *right)) % p)[1:].tolist()))
    return np.array(next(c for c in itertools.product(range(p), repeat=k) if c not in reducible))


@cache
def prime_power(n: int) -> tuple[int, int] | None:
    """(p, k) with p prime and p**k = n, or None."""
    if n < 2:
        return None
    p = next((d for d in range(2, isqrt(n) + 1) if n % d == 0), n)
    k = 0
    while n % p == 0:
        n, k = n // p, k + 1
    return (p, k) if n == 1 else None


@cache
def random_orthogonal(size: int) -> np.ndarray:
    """An orthogonal matrix, the same at every call, float64."""
    q, r = np.linalg.qr(np.random.default_rng(0).standard_normal((size, size)))
    return q * np.sign(np.diag(r))


def block_size(turned: Rotation) -> int:
    """Elements that a rotation mixes."""
    return prod(turned.orders) if turned.orders else turned.size
