"""Contractions: matrix products, convolutions, Einsum.

FLOPs are 2 per multiply-add; the gradient of each operand costs as much as the forward pass.
"""

from __future__ import annotations

from math import gcd, prod

from ir.factors import InternalCollective, Passing
from ir.graph import Tensor
from ir.operators.base import (
    AcrossSamples,
    BakedBatch,
    Context,
    Dims,
    MissingBatch,
    Result,
    Unsupported,
    bytes_of,
    kind,
)
from ir.operators.elementwise import broadcast
from ir.operators.windows import first_pads, spatial_sizes, window_of


def _product(
    ctx: Context, operands: list[tuple[int, Dims]], output: Dims, passing: Passing, flops: float | None = None
) -> Result:
    """A contraction of operands 0 and 1; its FLOPs are by default 2 times the product of all loop sizes of the rule."""
    flops = 2.0 * prod(f.size for f in ctx.rule.factors) if flops is None else flops
    return Result(
        operands,
        [output],
        passing=passing,
        forward_flops=flops,
        gradient_flops={0: flops, 1: flops},
        saved_inputs=[i for i in (0, 1) if ctx.needs_gradient[1 - i]],
    )


def _check(left: int, right: int) -> None:
    if left != right:
        raise Unsupported(f"contracted sizes {left} and {right} differ")


def _cut(tensor: Tensor, stop: int) -> Tensor:
    """The leading `stop` dims."""
    batch = tensor.batch_dim if tensor.batch_dim is not None and tensor.batch_dim < stop else None
    return Tensor(name=tensor.name, shape=tensor.shape[:stop], dtype=tensor.dtype, role=tensor.role, batch_dim=batch)


@kind(
    "MatMul",
    rule=(
        "... m k+, ... k n -> ... m n",
        "... m k+, k -> ... m",
        "k+, ... k n -> ... n",
        "... m k+, ... k n -> ... m 1",
    ),
)
def matmul(ctx: Context) -> Result:
    """A product of matrices, or of a matrix and a vector.

    The last line is the product of the samples of a batch with each other, as in contrastive losses.
    """
    a, b = ctx.tensor(0), ctx.tensor(1)
    if not a.shape or not b.shape:
        raise Unsupported("a scalar operand")
    rule = ctx.rule
    lead_a, lead_b = max(len(a.shape) - 2, 0), max(len(b.shape) - 2, 0)
    k_dim = 0 if len(b.shape) == 1 else len(b.shape) - 2
    _check(a.shape[-1], b.shape[k_dim])
    if a.batch_dim == len(a.shape) - 1 or b.batch_dim == k_dim:
        raise AcrossSamples("a product over samples")
    (dims_a, dims_b), out = broadcast(ctx, [(0, _cut(a, lead_a)), (1, _cut(b, lead_b))])
    k = rule.loop(a.shape[-1], name="k", summed=True)
    if len(a.shape) > 1:
        m = rule.dim(a, len(a.shape) - 2, name="m")
        dims_a.append(m)
        out.append(m)
    dims_a.append(k)
    dims_b.append(k)
    if len(b.shape) > 1:
        n = rule.dim(b, len(b.shape) - 1, name="n")
        dims_b.append(n)
        if b.batch_dim == len(b.shape) - 1 and a.batch_dim is not None:
            return _among_samples(ctx, dims_a, dims_b, [*out, n[1:]])
        out.append(n)
    return _product(ctx, [(0, dims_a), (1, dims_b)], out, "multi")


def _among_samples(ctx: Context, dims_a: Dims, dims_b: Dims, out: Dims) -> Result:
    """Similarities between all samples of a batch, which every rank computes; the cost is counted for one sample."""
    ctx.rule.mark([ctx.rule.batch()], fixed=True)
    result = _product(ctx, [(0, dims_a), (1, dims_b)], out, "none")
    result.replicated_because = "it compares the samples of a batch with each other (counted for one sample)"
    return result


@kind("Gemm", rule=tuple(f"{a}, {b}, [{{m n 1}}] -> m n" for a in ("m k+!", "k+! m") for b in ("k n", "n k")))
def gemm(ctx: Context) -> Result:
    """A product of two matrices, transposed according to `transA` and `transB`, plus an optional bias.

    With a bias the contracted dim stays whole (`!`), since otherwise each rank would add the bias to its partial sum.
    The importer makes the bias a separate operator to avoid this.
    """
    a, b = ctx.tensor(0), ctx.tensor(1)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise Unsupported("Gemm takes matrices")
    ta, tb = bool(ctx.int_attribute("transA", 0)), bool(ctx.int_attribute("transB", 0))
    m_dim, ka = (1, 0) if ta else (0, 1)
    # The initial state of an unrolled recurrent cell is a constant.
    ctx.keep_one_sample(0, m_dim)
    n_dim, kb = (0, 1) if tb else (1, 0)
    _check(a.shape[ka], b.shape[kb])
    if a.batch_dim == ka or b.batch_dim == kb:
        raise AcrossSamples("a product over samples")
    rule = ctx.rule
    m, n = rule.dim(a, m_dim, name="m"), rule.dim(b, n_dim, name="n")
    has_bias = ctx.has(2)
    k = rule.loop(a.shape[ka], name="k", summed=not has_bias, fixed=has_bias)
    operands: list[tuple[int, Dims]] = [(0, [k, m] if ta else [m, k]), (1, [n, k] if tb else [k, n])]
    if has_bias:
        bias = ctx.tensor(2)
        sizes = (rule.size(m), rule.size(n))
        dims: Dims = []
        for d in range(len(bias.shape)):
            target = d - len(bias.shape) + 2
            if bias.shape[d] == 1:
                dims.append(())
            elif bias.shape[d] == sizes[target]:
                dims.append((m, n)[target])
            else:
                raise Unsupported("the bias does not broadcast")
        operands.append((2, dims))
    return _product(ctx, operands, [m, n], "none" if has_bias else "multi")


def _halo(x: Tensor, dim: int, window: int, stride: int, begin: int) -> InternalCollective | None:
    """The halo exchange of a split of dim `dim`; None if windows do not overlap.

    Each rank receives the `begin` last rows of the previous rank and the remaining `window - stride - begin` rows from
    the next rank.
    """
    rows = begin + max(window - stride - begin, 0)
    if rows == 0:
        return None
    amount = rows * (x.num_elements / x.shape[dim]) * bytes_of(x.dtype)
    pair = (0.0, amount) if x.batch_dim is not None else (amount, 0.0)
    return InternalCollective(name="halo", kind="send_recv", forward_bytes=pair, backward_bytes=pair)


def _samples_of_channels(ctx: Context, groups: int) -> tuple[tuple[int, ...], int]:
    """The batch factor of the channel dim if each sample has its own weights, and the number of groups per sample.

    Networks that compute the weights of a convolution from their data (dynamic convolutions, StyleGAN2) merge the
    samples into the channels and use a grouped convolution: operands are `[1, (b c), ...]` and `[(b m), c, ...]`. An
    image `[1, c, ...]` that all samples share, such as StyleGAN2's learned first one, has one group for all of them.
    """
    x, w = ctx.tensor(0), ctx.tensor(1)
    if w.batch_dim is None:
        return (), groups
    is_shared = ctx.kind == "Conv" and x.batch_dim is None and x.shape[1] == w.shape[1] and groups == ctx.export_batch
    if w.batch_dim or not (is_shared or (x.batch_dim == 1 and groups % ctx.export_batch == 0)):
        raise AcrossSamples("each sample has weights of its own, and is not a group of channels")
    if ctx.has(2) and (bias := ctx.tensor(2)).batch_dim is None:
        channels = w.shape[0] if ctx.kind == "Conv" else w.shape[1] * groups // ctx.export_batch
        if bias.shape[0] == channels * ctx.export_batch != channels:
            raise BakedBatch(2, 0, channels)
        raise MissingBatch(2, 0)
    return (ctx.rule.batch(),), groups // ctx.export_batch


@kind("Conv", rule="n (g c+!) {(space@halo? stride!) rest!}, (g m) c {window!}, [(g m)] -> n (g m) {space new!}")
def conv(ctx: Context) -> Result:
    """Convolution, possibly with groups of channels.

    A spatial dim whose size is a multiple of the stride can be split; where windows overlap, this takes a halo
    exchange. Its factor is called h, w or d. Other spatial dims stay whole. With a bias the contracted channels stay
    whole, since otherwise each rank would add the bias to its partial sum.
    """
    x, w = ctx.tensor(0), ctx.tensor(1)
    rank = len(x.shape) - 2
    rule = ctx.rule
    own, groups = _samples_of_channels(ctx, ctx.int_attribute("group", 1))
    if rank < 1 or len(w.shape) != rank + 2 or x.batch_dim not in (None, 1 if own else 0):
        raise Unsupported("operands are not [batch, channels, ...]")
    if groups < 1 or w.shape[0] % groups or x.shape[1] != w.shape[1] * groups:
        raise Unsupported(f"{x.shape[1]} channels, weight {w.shape}, {groups} groups")
    window = window_of(ctx, w.shape[2:])
    strides = window.strides
    sizes = spatial_sizes(ctx, x.shape[2:], window)
    begin = first_pads(window, x.shape[2:], sizes)
    has_bias = ctx.has(2)
    n = rule.dim(x, 0, name="n")
    g = rule.loop(groups, name="g")
    c = rule.loop(w.shape[1], name="c", summed=not has_bias, fixed=has_bias)
    m = rule.loop(w.shape[0] // groups, name="m")
    dims_x: Dims = [n, (*(own if x.batch_dim is not None else ()), *g, *c)]
    dims_w: Dims = [(*own, *g, *m), c]
    out: Dims = [n, (*own, *g, *m)]
    for i, (size_in, size_out) in enumerate(zip(x.shape[2:], sizes, strict=True)):
        dims_w.append(rule.loop(window.sizes[i], fixed=True))
        shared = gcd(size_in, size_out)
        aligned = shared == size_out and size_in == size_out * strides[i] and size_out > 1
        if not aligned:
            dims_x.append(rule.loop(size_in, fixed=True))
            out.append(rule.loop(size_out, fixed=True))
            continue
        halo = _halo(x, 2 + i, window.extents[i], strides[i], begin[i])
        h = rule.factor(size_out, name="hwd"[i] if i < 3 else "", collective=halo)
        dims_x.append((h, *rule.loop(strides[i], fixed=True)))
        out.append((h,))
    operands: list[tuple[int, Dims]] = [(0, dims_x), (1, dims_w)]
    if has_bias:
        operands.append((2, [(*own, *g, *m)]))
    flops = 2.0 * x.shape[0] * w.num_elements * prod(sizes)
    return _product(ctx, operands, out, "none" if has_bias else "multi", flops)


@kind("ConvTranspose", rule="n (g c+!) {space!}, (g c) m {window!}, [(g m)] -> n (g m) {new!}")
def conv_transpose(ctx: Context) -> Result:
    """The transpose of a convolution: spatial dims stay whole, and with a bias also the contracted channels."""
    x, w = ctx.tensor(0), ctx.tensor(1)
    rank = len(x.shape) - 2
    own, groups = _samples_of_channels(ctx, ctx.int_attribute("group", 1))
    if rank < 1 or len(w.shape) != rank + 2 or x.batch_dim not in (None, 1 if own else 0):
        raise Unsupported("operands are not [batch, channels, ...]")
    if groups < 1 or x.shape[1] != w.shape[0] or w.shape[0] % groups:
        raise Unsupported(f"{x.shape[1]} channels, weight {w.shape}, {groups} groups")
    window = window_of(ctx, w.shape[2:])
    pads = window.pads
    extra = ctx.ints("output_padding") or (0,) * rank
    given = ctx.ints("output_shape")
    rule = ctx.rule
    has_bias = ctx.has(2)
    n = rule.dim(x, 0, name="n")
    g = rule.loop(groups, name="g")
    c = rule.loop(w.shape[0] // groups, name="c", summed=not has_bias, fixed=has_bias)
    m = rule.loop(w.shape[1], name="m")
    dims_x: Dims = [n, (*own, *g, *c)]
    dims_w: Dims = [(*own, *g, *c), m]
    out: Dims = [n, (*own, *g, *m)]
    for i in range(rank):
        size = window.strides[i] * (x.shape[2 + i] - 1) + extra[i] + window.extents[i] - pads[i] - pads[i + rank]
        if window.same:
            size = x.shape[2 + i] * window.strides[i]
        if given is not None:
            size = given[i - rank]
        dims_x.append((rule.factor(x.shape[2 + i], fixed=True),))
        dims_w.append((rule.factor(window.sizes[i], fixed=True),))
        out.append((rule.factor(size, fixed=True),))
    operands: list[tuple[int, Dims]] = [(0, dims_x), (1, dims_w)]
    if has_bias:
        operands.append((2, [(*own, *g, *m)]))
    flops = 2.0 * x.num_elements * (w.num_elements // w.shape[0])
    return _product(ctx, operands, out, "none" if has_bias else "multi", flops)


@kind(
    "DeformConv",
    rule="n channels! {space!}, m?! inner! {window!}, n places! {new!}, [m?!], [n masks! {new!}] -> n m?! {new!}",
)
def deform_conv(ctx: Context) -> Result:
    """Deformable convolution: operand 2 displaces the positions at which windows read, operand 4 weights what is read.

    Samples can be split, and output channels if there is a single group of channels. As in torchvision's kernel, the
    values that the windows read are written to memory before the matrix product. The gradient of the displacements is
    not counted separately.
    """
    x, w, moved = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    rank = len(x.shape) - 2
    if rank < 1 or len(w.shape) != rank + 2 or len(moved.shape) != rank + 2:
        raise Unsupported("operands are not [batch, channels, ...]")
    if w.batch_dim is not None:
        raise AcrossSamples("each sample has weights of its own")
    for index in (0, 2, 4):
        if ctx.has(index) and ctx.tensor(index).batch_dim not in (None, 0):
            raise Unsupported("the batch is not the first dim of its operands")
        if ctx.has(index) and (ctx.tensor(index).batch_dim is None) != (
            x.batch_dim is None and moved.batch_dim is None
        ):
            raise MissingBatch(index, 0)
    rule = ctx.rule
    groups, parts = ctx.int_attribute("group", 1), ctx.int_attribute("offset_group", 1)
    window = window_of(ctx, w.shape[2:])
    sizes, points = spatial_sizes(ctx, x.shape[2:], window), prod(window.sizes)
    shares = {2: rank * points * parts, 4: points * parts}
    fits = groups > 0 and w.shape[0] % groups == 0 and x.shape[1] == w.shape[1] * groups
    if not fits or any(ctx.has(i) and ctx.tensor(i).shape[1:] != (size, *sizes) for i, size in shares.items()):
        raise Unsupported(f"{x.shape[1]} channels, weight {w.shape}, {groups} groups, places {moved.shape}")
    n, m = rule.dim(x, 0, name="n"), rule.loop(w.shape[0], name="m", fixed=groups > 1)
    new: Dims = [rule.loop(size, fixed=True) for size in sizes]
    dims_w: Dims = [m, *[rule.loop(size, fixed=True) for size in w.shape[1:]]]
    operands: list[tuple[int, Dims]] = [(0, [n, *[rule.loop(size, fixed=True) for size in x.shape[1:]]]), (1, dims_w)]
    operands += [(i, [n, rule.loop(size, fixed=True), *new]) for i, size in shares.items() if ctx.has(i)]
    if ctx.has(3):
        operands.insert(3, (3, [m]))
    flops = 2.0 * x.shape[0] * w.num_elements * prod(sizes)
    columns = float(x.shape[0] * x.shape[1] * points * prod(sizes))
    whole = sum(ctx.tensor(i).num_elements for i, _ in operands) + x.shape[0] * w.shape[0] * prod(sizes)
    return Result(
        operands,
        [[n, m, *new]],
        [x.dtype],
        forward_flops=flops,
        gradient_flops={0 if ctx.needs_gradient[0] else 2: flops, 1: flops},
        traffic=(1.0 + 2.0 * columns / whole, 2.0 + 6.0 * columns / whole),
        saved_inputs=[i for i, _ in operands if i != 3],
    )


def explicit(equation: str) -> tuple[list[str], str]:
    """The subscripts of the operands and of the result of an einsum equation, which may omit the result."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        dots = "..." if "..." in left else ""
        right = dots + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    return left.split(","), right


@kind("Einsum", rule="{kept summed+ 1}* -> {kept}")
def einsum(ctx: Context) -> Result:
    """Einsum: the letters of attribute `equation` are the factors; those that the result lacks are summed.

    With two operands, a letter that appears in one operand only and not in the result is summed before the product. If
    no letter is summed over both operands, the product is elementwise.
    """
    terms, right = explicit(str(ctx.attributes["equation"]))
    equation = f"{','.join(terms)}->{right}"
    ranks = [len(ctx.tensor(i).shape) - len(t) + 3 for i, t in enumerate(terms) if "..." in t]
    if ranks:
        # Unused letters for the dims of the ellipsis, aligned to the right.
        used = set(equation)
        fresh = [c for c in map(chr, range(ord("A"), ord("A") + 200)) if c.isalpha() and c not in used]
        dots = "".join(fresh[: max(ranks)])
        spread = [len(ctx.tensor(i).shape) - len(t) + 3 for i, t in enumerate(terms)]
        terms = [
            t.replace("...", dots[len(dots) - n :]) if "..." in t else t for t, n in zip(terms, spread, strict=True)
        ]
        right = right.replace("...", dots)
    equation = f"{','.join(terms)}->{right}"
    rule = ctx.rule
    found: dict[str, tuple[int, ...]] = {}
    operands: list[tuple[int, Dims]] = []
    for i, term in enumerate(terms):
        tensor = ctx.tensor(i)
        if len(term) != len(tensor.shape) or len(set(term)) != len(term):
            raise Unsupported(f"term {term} for shape {tensor.shape}")
        dims: Dims = []
        for d, letter in enumerate(term):
            if letter not in found or not found[letter]:
                found[letter] = rule.dim(tensor, d, name=letter, summed=letter not in right)
            elif rule.size(found[letter]) != tensor.shape[d]:
                raise Unsupported(f"sizes of {letter} differ")
            if letter not in right and tensor.batch_dim == d:
                raise AcrossSamples("a sum over samples")
            # A dim of size 1 is broadcast over the samples of another operand.
            brings = tensor.batch_dim == d or tensor.shape[d] != 1
            dims.append(found[letter] if brings else ())
        operands.append((i, dims))
    out = [found[letter] for letter in right]
    if len(terms) == 2:
        shared = set(terms[0]) & set(terms[1])
        points = prod(rule.size(loop) for letter, loop in found.items() if letter in right or letter in shared)
        result = _product(ctx, operands, out, "multi", 2.0 * points if shared - set(right) else 0.0)
        result.attributes = {"equation": equation}
        return result
    flops = 2.0 * prod(f.size for f in rule.factors) if len(terms) > 1 else 0.0
    return Result(
        operands,
        [out],
        passing="multi",
        attributes={"equation": equation},
        forward_flops=flops,
        saved_inputs=range(len(terms)),
        gradient_flops=dict.fromkeys(range(len(terms)), flops) if flops else {},
    )
