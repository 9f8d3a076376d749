"""Training on several gloo ranks: every number is that of one device, on every rank."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import ConstraintError, InputError, PlanError, RuntimeStateError

PLANS = {"dp": {"dp": 2, "tp": 1}, "tp": {"dp": 1, "tp": 2}, "zero": {"dp": 2, "tp": 1, "zero": 3}}
STAGES = {"dp": 1, "tp": 1, "pp": 2, "schedule": "gpipe"}


class Net(nn.Module):
    """Tied, with a frozen layer, batch statistics, dropout and an unused parameter."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Parameter(torch.ones(4))
        self.double()  # a gradient that is zero but for rounding would show in AdamW's first steps

    def forward(self, ids):
        h = self.frozen(self.table(ids))
        h = h + self.drop(self.down(torch.relu(self.up(h))))
        return self.head(self.norm(h.mean(1)))


def data(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(16, (rows, 5), generator=generator), torch.randint(16, (rows,), generator=generator)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)


def pair(want, **kwargs):
    """(plain, compiled) with the plain model that rank 0 has; the other ranks start from other weights."""
    torch.manual_seed(0)
    plain = Net(kwargs.pop("dropout", 0.0))
    mine = copy.deepcopy(plain)
    if dist.get_rank():
        for p in mine.parameters():
            p.data.normal_()
    ids, labels = data()
    constraints = autopar.Constraints(**want)
    compiled = autopar.compile(
        mine, (ids,), loss_fn=cross_entropy, targets=(labels,), constraints=constraints, **kwargs
    )
    return plain, compiled


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(compiled, plain):
    """Parameters, gradients and buffers of both."""
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    ours = dict(compiled.named_parameters(remove_duplicate=False))
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(ours))
    assert {name for names in everywhere for name in names} == theirs.keys()
    assert compiled.plan.pp > 1 or ours.keys() == theirs.keys()
    for name in ours:
        p = theirs[name]
        assert ours[name].requires_grad == p.requires_grad
        torch.testing.assert_close(whole(ours[name].detach()), p.detach(), msg=lambda m, n=name: f"{n}: {m}")
        assert (ours[name].grad is None) == (p.grad is None), name
        if p.grad is not None:
            assert ours[name].grad.placements == ours[name].placements
            torch.testing.assert_close(whole(ours[name].grad), p.grad, msg=lambda m, n=name: f"{n}.grad: {m}")
    buffers = dict(plain.named_buffers())
    for name, b in compiled.named_buffers():
        torch.testing.assert_close(whole(b), buffers[name])


# training -------------------------------------------------------------------------------------------------------------


def follow(want, optimizer):
    plain, compiled = pair(want)
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    ours = make([p for p in compiled.parameters() if p.requires_grad], lr=0.05)
    theirs = make([p for p in plain.parameters() if p.requires_grad], lr=0.05)
    ids, labels = data()
    for step in range(3):
        ids = (ids + step) % 16
        theirs.zero_grad()
        ours.zero_grad()
        wanted = cross_entropy(plain(ids), labels)
        wanted.backward()
        loss = compiled(ids, targets=(labels,))
        assert type(loss) is torch.Tensor
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(autopar.clip_grad_norm_(compiled, 0.5), norm)
        ours.step()
        theirs.step()
        assert_same(compiled, plain)
    assert compiled.head.weight is compiled.table.weight
    return sum(p.to_local().numel() for p in compiled.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("want", [*PLANS.values(), STAGES], ids=[*PLANS, "pp"])
def test_training_follows_one_device(ranks, want, optimizer):
    held = ranks(2, follow, want, optimizer)
    every = sum(p.numel() for p in Net().parameters())
    assert all(h < 0.85 * every for h in held) == (want != PLANS["dp"])


def test_training_follows_one_device_on_four_ranks(ranks):
    ranks(4, follow, {"dp": 2, "tp": 2, "zero": 3}, "adamw")


def optimizer_from_before(want):
    torch.manual_seed(0)
    plain = Net()
    mine = copy.deepcopy(plain)
    groups = lambda m: [{"params": [m.up.weight], "weight_decay": 0.5}, {"params": [m.down.weight], "lr": 0.3}]  # noqa: E731
    ours, theirs = torch.optim.AdamW(groups(mine), lr=0.1), torch.optim.AdamW(groups(plain), lr=0.1)
    ids, labels = data()
    for model, optimizer in ((mine, ours), (plain, theirs)):  # one step before, so that there is state to move
        cross_entropy(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    dead = list(mine.parameters())
    compiled = autopar.compile(
        mine, (ids,), loss_fn=cross_entropy, targets=(labels,), constraints=autopar.Constraints(**want)
    )
    for _ in range(2):
        for model, optimizer, loss in (
            (plain, theirs, lambda: cross_entropy(plain(ids), labels)),
            (compiled, ours, lambda: compiled(ids, targets=(labels,))),
        ):
            model.zero_grad()
            loss().backward()
            optimizer.step()
    assert_same(compiled, plain)
    late = torch.optim.SGD(dead, 0.1)
    with pytest.raises(RuntimeStateError, match="parameters from before"):
        late.step()


@pytest.mark.parametrize("want", [*PLANS.values(), STAGES], ids=[*PLANS, "pp"])
def test_an_optimizer_made_before_keeps_working(ranks, want):
    ranks(2, optimizer_from_before, want)


def accumulate(want):
    plain, compiled = pair(want)
    ids, labels = data()
    for part in (slice(0, 4), slice(4, 8)):
        (cross_entropy(plain(ids[part]), labels[part]) / 2).backward()
        with compiled.no_sync():
            (compiled(ids[part], targets=(labels[part],)) / 2).backward()
    assert_same(compiled, plain)
    plain.zero_grad()
    compiled.zero_grad()
    first, second = compiled(ids, targets=(labels,)), compiled(ids + 0, targets=(labels.flip(0),))
    (first - 3 * second).backward()
    (cross_entropy(plain(ids), labels) - 3 * cross_entropy(plain(ids), labels.flip(0))).backward()
    assert_same(compiled, plain)


@pytest.mark.parametrize("want", PLANS.values(), ids=PLANS)
def test_accumulation_and_two_forwards(ranks, want):
    ranks(2, accumulate, want)


def evaluate(want):
    plain, compiled = pair(want, dropout=0.3, rng="exact")
    ids, labels = data()
    for step in range(2):
        for loss in (lambda: cross_entropy(plain(ids), labels), lambda: compiled(ids, targets=(labels,))):
            torch.manual_seed(step)
            loss().backward()
        plain.eval()
        compiled.eval()
        with torch.no_grad():
            wanted = cross_entropy(plain(ids[:3]), labels[:3])
            torch.testing.assert_close(compiled(ids[:3], targets=(labels[:3],)), wanted)
        plain.train()
        compiled.train()
    assert_same(compiled, plain)


@pytest.mark.parametrize("want", [*PLANS.values(), STAGES], ids=[*PLANS, "pp"])
def test_evaluation_between_steps_and_exact_dropout(ranks, want):
    ranks(2, evaluate, want)


def scaled(want, where):
    plain, compiled = pair(want)
    ids, labels = data()
    scales = []
    for module, loss in (
        (plain, lambda: cross_entropy(plain(ids), labels)),
        (compiled, lambda: compiled(ids, targets=(labels,))),
    ):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss()).backward()
            if step == 1:  # overflow that one rank sees
                gradient = module.get_parameter(where).grad
                here = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                if module is plain or dist.get_rank() == 1:
                    here.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    return whole(compiled.up.weight.detach()), whole(plain.up.weight.detach())


@pytest.mark.parametrize(("want", "where"), [(PLANS["tp"], "up.weight"), (PLANS["zero"], "down.weight")])
def test_a_scaler_makes_all_ranks_skip_together(ranks, want, where):
    for ours, theirs in ranks(2, scaled, want, where):
        torch.testing.assert_close(ours, theirs)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.b(self.a(x)).float().sum()


def overflow():
    """Two float16 gradients, of which scaling lifts one element over the largest number."""
    torch.manual_seed(0)
    model = Half().half()
    x = torch.full((2, 4), 1.0, dtype=torch.half)
    compiled = autopar.compile(model, (x,), constraints=autopar.Constraints(dp=1, tp=2))
    (compiled(x) * 2.0**17).backward()
    return [bool(torch.isfinite(p.grad.to_local()).all()) for p in compiled.parameters()]


def test_overflow_by_scaling_is_seen_on_all_ranks(ranks):
    assert ranks(2, overflow) == [[False, False], [False, False]]


# batches --------------------------------------------------------------------------------------------------------------


def local_batches(want, kind):
    plain, _ = pair(want)
    torch.manual_seed(0)
    ids, labels = data()
    data_ranks = want["dp"]
    place = dist.get_rank() * data_ranks // dist.get_world_size()
    part = lambda t: t.chunk(data_ranks)[place]  # noqa: E731
    example = [t.to("meta") if kind == "meta" else t for t in (part(ids), part(labels))]
    compiled = autopar.compile(
        copy.deepcopy(plain),
        (example[0],),
        loss_fn=cross_entropy,
        targets=(example[1],),
        constraints=autopar.Constraints(**want),
        batch="local",
    )
    for rows in (8, 6):
        ids, labels = data(rows)
        wanted = cross_entropy(plain(ids), labels)
        wanted.backward()
        loss = compiled(part(ids), targets=(part(labels),))
        torch.testing.assert_close(loss, wanted)
        loss.backward()
    assert_same(compiled, plain)


@pytest.mark.parametrize("kind", ["real", "meta"])
@pytest.mark.parametrize("want", PLANS.values(), ids=PLANS)
def test_every_data_rank_may_pass_its_part(ranks, want, kind):
    ranks(2, local_batches, want, kind)


def loaders(kind):
    plain, compiled = pair(PLANS["dp"])
    ids, labels = data(20)
    rows = list(zip(ids, labels, strict=True))
    torch.manual_seed(dist.get_rank())  # shuffled otherwise on every rank
    if kind == "rows":
        loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    else:
        loader = [[ids[i : i + 8], labels[i : i + 8]] for i in range(0, 20, 8)]
    seen = []
    sharded = compiled.shard(loader)
    assert len(sharded) == 3
    for ids, labels in sharded:
        assert isinstance(ids, DTensor)
        assert ids.to_local().shape[0] == ids.shape[0] // 2
        seen.append(ids.full_tensor())
        wanted = cross_entropy(plain(seen[-1]), labels.full_tensor())
        torch.testing.assert_close(compiled(ids, targets=(labels,)), wanted)
    return torch.cat(seen).sort(0).values, data(20)[0].sort(0).values


@pytest.mark.parametrize("kind", ["rows", "batches"])
def test_loaders_give_every_rank_its_rows(ranks, kind):
    for seen, every in ranks(2, loaders, kind):
        assert torch.equal(seen, every)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, mask, kinds):  # [batch, length, 6], [length, length], [batch]
        scores = self.layer(x) @ x.transpose(1, 2) + mask
        return (scores.softmax(-1).square().sum((1, 2)) * kinds).sum()


def local_mask():
    torch.manual_seed(0)
    plain, x, mask, kinds = Masked(), torch.randn(8, 4, 6), torch.ones(4, 4).tril(), torch.arange(8.0)
    own = lambda t: t.chunk(2)[dist.get_rank()]  # noqa: E731
    mine = own(x)  # 4 rows: as many as the mask has
    compiled = autopar.compile(
        copy.deepcopy(plain), (mine, mask, own(kinds)), constraints=autopar.Constraints(dp=2), batch="local"
    )
    wanted = plain(x, mask, kinds)
    wanted.backward()
    loss = compiled(mine, mask, own(kinds))
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    assert_same(compiled, plain)

    class Counting(nn.Linear):
        def forward(self, x, counts):
            return super().forward(x).sum() * counts.sum()

    with pytest.raises(InputError, match=r"all data ranks pass the same args\[1\]"):
        autopar.compile(Counting(6, 1), (mine, torch.ones(4)), constraints=autopar.Constraints(dp=2), batch="local")


def test_a_mask_with_as_many_rows_as_the_batch_is_not_split(ranks):
    ranks(2, local_mask)


def uneven_local():
    ids, labels = data(8)
    rank = dist.get_rank()
    part = lambda t, cut: (t[:cut], t[cut:])[rank]  # noqa: E731
    model = Net()
    compiled = autopar.compile(
        model,
        (part(ids, 4),),
        loss_fn=cross_entropy,
        targets=(part(labels, 4),),
        constraints=autopar.Constraints(dp=2),
        batch="local",
    )
    compiled(part(ids, 4), targets=(part(labels, 4),)).backward()
    with pytest.raises(InputError, match=r"\[4, 2\] rows"):  # on both, though only one rank's shape is new
        compiled(*((ids[:4],) if rank == 0 else (ids[:2],)), targets=((labels[:4],) if rank == 0 else (labels[:2],)))
    compiled(part(ids, 4), targets=(part(labels, 4),)).backward()


def test_parts_that_do_not_fit_are_refused_on_all_ranks(ranks):
    ranks(2, uneven_local)


def different_batches():
    _, compiled = pair(PLANS["dp"])
    ids, labels = data()
    with pytest.raises(InputError, match=r"values of args\[0\] differ between rank 0 and rank 1"):
        compiled(ids if dist.get_rank() == 0 else ids.flip(0), targets=(labels,))
    rows = 7 - dist.get_rank()
    with pytest.raises(InputError, match=r"rank 1 passes args\[0\] = int64\[6, 5\] where rank 0 passes"):
        compiled(ids[:rows], targets=(labels[:rows],))
    compiled(ids, targets=(labels,)).backward()


def test_ranks_that_pass_different_global_batches_are_told(ranks):
    ranks(2, different_batches)


def dtensor_inputs(want):
    plain, compiled = pair(want)
    ids, labels = data()
    mesh = compiled.up.weight.device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    given = distribute_tensor(ids, mesh, [Shard(0), Replicate()])
    loss = compiled(given, targets=(labels,))
    wanted = cross_entropy(plain(ids), labels)
    torch.testing.assert_close(loss, wanted)
    wanted.backward()
    loss.backward()
    assert_same(compiled, plain)


@pytest.mark.parametrize("want", PLANS.values(), ids=PLANS)
def test_dtensor_inputs_are_welcome(ranks, want):
    ranks(2, dtensor_inputs, want)


class Floats(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def input_gradients(want):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    plain, x = Floats(), torch.randn(4, 4)
    compiled = autopar.compile(
        copy.deepcopy(plain),
        (x.clone().requires_grad_(),),
        loss_fn=lambda y: y.square().sum(),
        constraints=autopar.Constraints(**want),
    )
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(theirs).square().sum().backward()
    compiled(ours).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    given = distribute_tensor(x, compiled.a.weight.device_mesh, [Shard(0), Replicate()]).requires_grad_()
    compiled(given).backward()
    assert given.grad.placements == given.placements
    torch.testing.assert_close(given.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("want", PLANS.values(), ids=PLANS)
def test_inputs_get_gradients_as_they_came(ranks, want):
    ranks(2, input_gradients, want)


def outside(want):
    torch.manual_seed(0)
    plain, x = Floats(), torch.randn(4, 4)
    compiled = autopar.compile(copy.deepcopy(plain), (x,), constraints=autopar.Constraints(**want))
    for _ in range(2):
        output = compiled(x)
        assert isinstance(output, DTensor)
        torch.testing.assert_close(output.full_tensor(), plain(x))
        output.full_tensor().square().mean().backward()
        plain(x).square().mean().backward()
    assert_same(compiled, plain)


@pytest.mark.parametrize("want", PLANS.values(), ids=PLANS)
def test_the_loss_may_be_computed_outside(ranks, want):
    ranks(2, outside, want)


def results():
    torch.manual_seed(0)
    plain, x = Floats(), torch.randn(4, 4)
    compiled = autopar.compile(
        copy.deepcopy(plain),
        (x,),
        loss_fn=lambda y: {"loss": y.mean(), "y": y, "top": y.max(), "n": 3},
        constraints=autopar.Constraints(dp=2),
    )
    out = compiled(x)
    assert isinstance(out["y"], DTensor)
    torch.testing.assert_close(out["y"].full_tensor(), plain(x).detach())
    assert type(out["top"]) is torch.Tensor
    torch.testing.assert_close(out["top"], plain(x).max().detach())
    assert out["n"] == 3
    return out["y"].to_local().shape[0]


def test_results_are_dtensors_and_scalars_are_the_global_value(ranks):
    assert ranks(2, results) == [2, 2]


def fast_dropout(want):
    _, compiled = pair(want, dropout=0.5)
    ids, labels = data()
    torch.manual_seed(dist.get_rank())  # ranks that are seeded differently
    losses = []
    for seed in (3, 3, 4):
        if dist.get_rank() == 0:
            torch.manual_seed(seed)
        compiled.zero_grad()
        loss = compiled(ids, targets=(labels,))
        loss.backward()
        losses.append(loss.item())
    return losses, whole(compiled.up.weight.grad)


@pytest.mark.parametrize("want", PLANS.values(), ids=PLANS)
def test_fast_dropout_is_one_mask_on_all_ranks_and_repeats(ranks, want):
    (one, grad), (other, other_grad) = ranks(2, fast_dropout, want)
    assert one == other
    assert one[0] == one[1] != one[2]
    assert torch.equal(grad, other_grad)


# states ---------------------------------------------------------------------------------------------------------------


def from_meta(want):
    with torch.device("meta"):
        model = Net()
    ids, labels = data()
    compiled = autopar.compile(
        model,
        (ids.to("meta"),),
        loss_fn=cross_entropy,
        targets=(labels.to("meta"),),
        constraints=autopar.Constraints(**want),
    )
    with pytest.raises(RuntimeStateError, match="no values yet"):
        compiled(ids, targets=(labels,))
    with pytest.raises(RuntimeStateError, match="no layer initialises unused"):
        compiled.init_weights(0)
    torch.manual_seed(0)
    plain = Net()
    compiled.load_state_dict(plain.state_dict())
    compiled(ids, targets=(labels,)).backward()
    cross_entropy(plain(ids), labels).backward()
    assert_same(compiled, plain)


@pytest.mark.parametrize("want", [*PLANS.values(), STAGES], ids=[*PLANS, "pp"])
def test_models_on_meta_are_filled_later(ranks, want):
    ranks(2, from_meta, want)


def initialised(want, world):
    with torch.device("meta"):
        model = Floats()
    compiled = autopar.compile(
        model, (torch.empty(4, 4, device="meta"),), loss_fn=lambda y: y.sum(), constraints=autopar.Constraints(**want)
    )
    compiled.init_weights(7)
    compiled(torch.ones(4, 4)).backward()
    return {n: whole(p.detach()) for n, p in compiled.named_parameters()}


def test_initial_values_do_not_depend_on_the_plan(ranks):
    found = [r for want in [*PLANS.values(), STAGES] for r in ranks(2, initialised, want, 2)]
    found += ranks(4, initialised, {"dp": 2, "tp": 2, "zero": 3}, 4)
    for other in found:
        for name, value in other.items():
            assert torch.equal(value, found[0][name])
    bound = found[0]["a.weight"].abs().max()
    assert 0.3 < bound <= 0.5


def other_models():
    model = nn.Linear(4, 4 + dist.get_rank())
    with pytest.raises(InputError, match="every rank must build the same model"):
        autopar.compile(model, (torch.ones(2, 4),), loss_fn=lambda y: y.sum())


def test_ranks_with_different_models_are_refused(ranks):
    ranks(2, other_models)


def refusals():
    ids, labels = data()

    def attempt(loss_fn=cross_entropy, model=None, **kwargs):
        autopar.compile(model or Net(), (ids,), loss_fn=loss_fn, targets=(labels,), **kwargs)

    with pytest.raises(ConstraintError, match="takes 4 ranks and 2 are running"):
        attempt(constraints=autopar.Constraints(dp=2, tp=2))
    with pytest.raises(ConstraintError, match="product 2"):
        attempt(constraints=autopar.Constraints(dp=3))
    with pytest.raises(ConstraintError, match="Constraints\\(dp"):
        attempt(batch="local")

    def fails_on_one(logits, labels):
        if dist.get_rank() == 1:
            raise ValueError("only here")
        return cross_entropy(logits, labels)

    with pytest.raises(autopar.AutoparError, match="only here"):
        attempt(loss_fn=fails_on_one)
    plan = autopar.plan(Net(), (ids,), loss_fn=cross_entropy, targets=(labels,), cluster=autopar.Cluster.local(4))
    with pytest.raises(PlanError, match="nproc-per-node 4"):
        attempt(plan=plan)
    attempt()


def test_errors_are_raised_on_all_ranks(ranks):
    ranks(2, refusals)


def given_plan():
    ids, labels = data()
    torch.manual_seed(0)
    plain = Net()
    plan = autopar.plan(
        plain,
        (ids,),
        loss_fn=cross_entropy,
        targets=(labels,),
        cluster=autopar.Cluster.local(2),
        constraints=autopar.Constraints(tp=2),
    )
    compiled = autopar.compile(copy.deepcopy(plain), (ids,), loss_fn=cross_entropy, targets=(labels,), plan=plan)
    assert compiled.plan == plan
    compiled(ids, targets=(labels,)).backward()
    cross_entropy(plain(ids), labels).backward()
    assert_same(compiled, plain)
    again = autopar.compile(compiled, (ids,), loss_fn=cross_entropy, targets=(labels,))  # another plan, same weights
    again.zero_grad()
    again(ids, targets=(labels,)).backward()
    plain.zero_grad()
    cross_entropy(plain(ids), labels).backward()
    torch.testing.assert_close(whole(again.up.weight.grad), plain.up.weight.grad)
    with pytest.raises(RuntimeStateError, match="was replaced"):
        compiled(ids, targets=(labels,))


def test_a_plan_can_be_given_and_a_model_compiled_again(ranks):
    ranks(2, given_plan)


def uneven_steps():
    ids, labels = data()
    _, compiled = pair(PLANS["tp"], timeout_s=3)
    compiled(ids, targets=(labels,)).backward()
    if dist.get_rank() == 1:
        return None
    with pytest.raises(RuntimeStateError, match=r"rank 0 waited in vain .* in step 2, .*Ranks 1 failed") as caught:
        compiled(ids, targets=(labels,))
    return str(caught.value)


def test_a_rank_that_stops_earlier_is_told_within_the_timeout(ranks):
    message, _ = ranks(2, uneven_steps)
    assert "layer" in message


@dataclasses.dataclass
class Alternating:
    first: object
    second: object


def two_modules():
    ids, labels = data()
    both = Alternating(pair(PLANS["dp"]), pair(PLANS["tp"]))
    for _ in range(2):
        for plain, compiled in (both.first, both.second):
            compiled(ids, targets=(labels,)).backward()
            cross_entropy(plain(ids), labels).backward()
    for plain, compiled in (both.first, both.second):
        assert_same(compiled, plain)
    same = pair(PLANS["dp"])[1]
    assert same.engine.groups is both.first[1].engine.groups


def test_modules_share_groups_and_nothing_else(ranks):
    ranks(2, two_modules)


def adversaries(want):
    torch.manual_seed(0)
    make = lambda: (Floats(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))  # noqa: E731
    generator, critic = make()
    teacher = copy.deepcopy(generator)
    z, real = torch.randn(4, 4), torch.randn(4, 4)
    constraints = autopar.Constraints(**want)
    ours = [autopar.compile(copy.deepcopy(m), (z,), constraints=constraints) for m in (generator, critic, teacher)]
    theirs = [generator, critic, teacher]

    def round_of(g, c, t):
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (g, c)]
        for _ in range(2):
            for m in (g, c):
                m.zero_grad()
            loss = c(real).mean() - c(g(z).detach()).mean()
            loss.backward()
            optimizers[1].step()
            g.zero_grad()
            c(g(z)).mean().backward()
            optimizers[0].step()
            with torch.no_grad():
                student = dict(g.named_parameters())
                for name, p in t.named_parameters():
                    p.lerp_(student[name], 0.1)

    round_of(*ours)
    round_of(*theirs)
    for mine, plain in zip(ours, theirs, strict=True):
        assert_same(mine, plain)


@pytest.mark.parametrize("want", [PLANS["dp"], PLANS["zero"]], ids=["dp", "zero"])
def test_modules_feed_each_other_and_a_teacher_follows(ranks, want):
    ranks(2, adversaries, want)
