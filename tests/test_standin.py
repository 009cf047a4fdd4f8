"""That the stand-in device computes what the CPU does, refuses what it should, and counts what it says."""

import copy

import gpytorch
import linear_operator
import pytest
import torch

from tests import _dense as dense
from tests import _standin as standin
from tests._standin import DEVICE, MixedDevicesError, count_transfers, to_host, to_standin

pytestmark = pytest.mark.skipif(bool(standin.UNAVAILABLE), reason=standin.UNAVAILABLE)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda device: torch.zeros(2, 3, device=device), (2, 3)),
        (lambda device: torch.ones(2, 3, device=device), (2, 3)),
        (lambda device: torch.full((2,), 1.5, device=device), (2,)),
        (lambda device: torch.arange(5, device=device), (5,)),
        (lambda device: torch.arange(2, 5, device=device), (3,)),
        (lambda device: torch.arange(2, 9, 3, device=device), (3,)),
        (lambda device: torch.eye(3, device=device), (3, 3)),
        (lambda device: torch.eye(3, 4, device=device), (3, 4)),
        (lambda device: torch.linspace(0, 1, 4, device=device), (4,)),
        (lambda device: torch.logspace(0, 1, 4, device=device), (4,)),
        (lambda device: torch.triu_indices(3, 3, device=device), (2, 6)),
        (lambda device: torch.tensor([1.0, 2.0], device=device), (2,)),
        (lambda device: torch.tensor(3, device=device), ()),
        (lambda device: torch.as_tensor([1.0, 2.0], device=device), (2,)),
        (lambda device: torch.zeros(4, device=device).new_full((2, 2), 7.0), (2, 2)),
        (lambda device: torch.zeros(4, device=device).new_tensor([1.0, 2.0]), (2,)),
        (lambda device: torch.ones(4).to(device, torch.float64), (4,)),
        (lambda device: torch.ones(4).to(str(device)), (4,)),
    ],
)
def test_factories_make_tensors_on_the_device(make, shape):
    made = make(DEVICE)
    assert made.device == DEVICE
    assert made.shape == shape
    expected = make(torch.device("cpu"))
    assert made.dtype == expected.dtype
    assert torch.equal(made.cpu(), expected)


@pytest.mark.parametrize(
    "make", [torch.randn, torch.rand, torch.empty, lambda n, device: torch.randperm(n, device=device)]
)
def test_random_factories_make_tensors_on_the_device(make):
    made = make(5, device=DEVICE)
    assert made.device == DEVICE
    assert made.shape == (5,)
    assert torch.empty_like(made).device == DEVICE


def test_random_numbers_follow_the_global_seed_and_no_generator_of_the_cpu():
    torch.manual_seed(3)
    first = torch.randn(5, device=DEVICE)
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(5, device=DEVICE))
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(5, device=DEVICE, generator=torch.Generator())


FUNCTIONS = {
    "matmul": lambda a: a @ a.mT,
    "einsum": lambda a: torch.einsum("ij,kj->ik", a, a),
    "eigh": lambda a: torch.linalg.eigh(a @ a.mT).eigenvalues,
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT + torch.eye(len(a), device=a.device)),
    "solve": lambda a: torch.linalg.solve(a, a.mT),
    "qr": lambda a: torch.linalg.qr(a).R.abs(),
    "sort": lambda a: a.sort(-1).values,
    "cat": lambda a: torch.cat([a, a.flip(0)]),
    "index": lambda a: a[torch.arange(3, device=a.device)],
    "mask": lambda a: a[a > 0],
    "masked_fill": lambda a: a.masked_fill(a > 0, 2.0),
    "where": lambda a: torch.where(a > 0, a, torch.zeros((), dtype=a.dtype)),
    "index_add": lambda a: a.new_zeros(9, 4).index_add(0, torch.arange(4, device=a.device) * 2, a),
    "searchsorted": lambda a: torch.searchsorted(a.flatten().sort().values, a.flatten()) * a.flatten(),
    "view written to": lambda a: a.clone().index_fill_(0, torch.arange(2, device=a.device), 0.5).T[1:].mul_(3.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name):
    results = []
    for device in (torch.device("cpu"), DEVICE):
        a = dense.randn(4, 4).to(device).requires_grad_(True)
        value = FUNCTIONS[name](a)
        value.square().sum().backward()
        assert value.device == a.grad.device == device
        results.append((to_host(value.detach()), to_host(a.grad)))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_writes_through_views_reach_the_base_and_its_version():
    base = torch.zeros(3, 3, device=DEVICE)
    version, pointer = base._version, base.data_ptr()
    base[1].add_(1.0)
    base[:, 2] = 5.0
    assert base.tolist() == [[0.0, 0.0, 5.0], [1.0, 1.0, 5.0], [0.0, 0.0, 5.0]]
    assert base._version > version
    assert base.data_ptr() == base.detach().data_ptr() == base.view(-1).data_ptr() == pointer != base.clone().data_ptr()


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(1) * x,
        lambda x: x @ torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: x[torch.tensor([True, False, True])],
        lambda x: torch.ones(3)[torch.arange(2, device=x.device)],
        lambda x: x.index_put_((torch.tensor(1),), x[0]),
        lambda x: x.index_add(0, torch.tensor([1]), x[:1]),
        lambda x: torch.zeros(()).add_(x[0]),
        lambda x: torch.searchsorted(x, torch.ones(3)),
        lambda x: torch.where(torch.ones(3) > 0, x, x),
    ],
)
def test_mixed_devices_raise(mix):
    with pytest.raises(MixedDevicesError, match="expected all tensors on privateuseone:0"):
        mix(torch.ones(3, device=DEVICE))


def test_numbers_and_empty_shapes_of_the_host_are_welcome():
    x = torch.ones(3, device=DEVICE)
    for value in (x + torch.tensor(1.0), torch.tensor(1.0) + x, 1.0 + x, x.clamp(max=torch.tensor(0.5))):
        assert value.device == DEVICE


def test_no_array_without_a_copy():
    with pytest.raises(TypeError, match="numpy"):
        torch.ones(3, device=DEVICE).numpy()


@pytest.mark.parametrize(
    ("do", "copies", "syncs"),
    [
        (lambda x: x.cpu(), 1, 0),
        (lambda x: x.to("cpu"), 1, 0),
        (lambda x: x.to(torch.float64), 0, 0),
        (lambda x: x.to(DEVICE), 0, 0),
        (lambda x: x.cpu().numpy(), 1, 0),
        (lambda x: x.tolist(), 0, 1),
        (lambda x: x.expand(1000, 3).tolist(), 1, 0),
        (lambda x: torch.ones(3).to(DEVICE), 1, 0),
        (lambda x: torch.tensor([1.0], device=DEVICE), 1, 0),
        (lambda x: x.copy_(torch.ones(3)), 1, 0),
        (lambda x: torch.ones(3).copy_(x), 1, 0),
        (lambda x: x.copy_(x + 1), 0, 0),
        (lambda x: x.sum().item(), 0, 1),
        (lambda x: float(x[0]), 0, 1),
        (lambda x: bool((x > 0).all()), 0, 1),
        (lambda x: x.nonzero(), 0, 1),
        (lambda x: x[x > 0], 0, 1),
        (lambda x: x.masked_select(x > 0), 0, 1),
        (lambda x: x.unique(), 0, 1),
        (lambda x: torch.unique(x, return_inverse=True), 0, 1),
        (lambda x: torch.equal(x, x + 1), 0, 1),
        (lambda x: torch.linalg.cholesky(x.diag()), 0, 1),
        (lambda x: torch.repeat_interleave(x, x.long()), 0, 1),
        (lambda x: torch.linalg.cholesky_ex(x.diag()), 0, 0),
        (lambda x: x.index_fill(0, torch.arange(2, device=DEVICE), 3.0), 0, 0),
        (lambda x: x.sort(), 0, 0),
    ],
)
def test_copies_and_waits_are_counted(do, copies, syncs):
    x = torch.ones(3, device=DEVICE)
    with count_transfers() as counts:
        do(x)
    assert (counts.copies, counts.syncs) == (copies, syncs), counts


def test_counts_by_operation_nest_and_include_the_backward_pass():
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            assert float(gradient.sum()) > 0
            return gradient

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with count_transfers() as outer:
        x.detach().cpu()
        with count_transfers() as inner:
            Looks.apply(x).sum().backward()
    x.detach().cpu()
    assert inner.by_op == {("sync", "_local_scalar_dense"): 1}
    assert outer.by_op == {("to host", "_to_copy"): 1, ("sync", "_local_scalar_dense"): 1}
    assert {event.where.rpartition(":")[0] for event in outer.events} == {__file__}
    assert outer.within(gpytorch).events == []


def test_modules_move_copy_and_say_what_they_left_behind():
    module = to_standin(torch.nn.BatchNorm1d(3))
    assert {t.device for t in module.state_dict().values()} == {DEVICE}
    assert all(isinstance(p, torch.nn.Parameter) for p in module.parameters())
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module.weight.fill_(7.0)
    assert twin.weight.tolist() == [1.0] * 3
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert to_standin(module).weight.tolist() == [7.0] * 3

    class Stays(torch.nn.Linear):
        def _apply(self, function, recurse=True):
            return self

    with pytest.raises(MixedDevicesError, match="weight, bias"):
        to_standin(Stays(2, 2))


class _DenseGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: gpytorch.kernels.RBFKernel(ard_num_dims=2),
        lambda: gpytorch.kernels.MaternKernel(nu=1.5),
        lambda: gpytorch.kernels.PeriodicKernel(),
    ],
    ids=["RBF", "Matern", "periodic"],
)
def test_a_dense_gp_trains_and_predicts_as_on_the_cpu(kernel):
    """GPyTorch itself, from `.to(device)` to Adam: what fails here is the stand-in's fault, not ours."""
    x = dense.randn(20, 2)
    y, new = x.sum(-1).sin(), dense.randn(5, 2, seed=1)
    results = []
    for move in (lambda value: value, to_standin):
        model = move(_DenseGP(x, y, kernel()).double())
        with linear_operator.settings.max_cholesky_size(10_000):
            losses = standin.training_steps(model, steps=3)
            model.eval()
            with torch.no_grad():
                posterior = model.likelihood(model(move(new)))
                results.append([losses, *to_host([posterior.mean, posterior.variance])])
        assert {p.device for p in model.parameters()} == {posterior.mean.device}
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-9)
    assert results[0][0][-1] < results[0][0][0]
    for got, expected in zip(results[1][1:], results[0][1:], strict=True):
        assert dense.relative(got, expected) < 1e-9


def test_fourier_transforms_and_conjugates():
    """Values and gradients; a conjugate is lazy, and must not be lost."""

    def values(x):
        y = torch.fft.fft(torch.fft.rfft(x, n=7), n=8, dim=-2)
        image = torch.fft.irfft(torch.fft.ifft(y * y.real, n=8, dim=-2), n=7)
        return image[:5], (y.conj() * y).real, y.conj().imag

    host = dense.randn(5, 4).requires_grad_(True)
    there = to_standin(host.detach()).requires_grad_(True)
    for got, expected in zip(values(there), values(host), strict=True):
        torch.testing.assert_close(to_host(got), expected.detach())
        (ours,) = torch.autograd.grad(got.pow(3).sum(), there, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected.pow(3).sum(), host, retain_graph=True)
        torch.testing.assert_close(to_host(ours), theirs)
