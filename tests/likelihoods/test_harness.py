"""GPyTorch's own likelihood harness, for learned and for known noise."""

import unittest

import torch
from gpytorch.test.base_likelihood_test_case import BaseLikelihoodTestCase

from gpytorch_gaps import GappyGridLikelihood


class TestLearnedNoise(BaseLikelihoodTestCase, unittest.TestCase):
    seed = 0

    def create_likelihood(self):
        return GappyGridLikelihood()


class TestKnownNoise(BaseLikelihoodTestCase, unittest.TestCase):
    seed = 0

    def create_likelihood(self):
        return GappyGridLikelihood(noise=0.5 + torch.rand(5))


class TestKnownConstantNoise(BaseLikelihoodTestCase, unittest.TestCase):
    seed = 0

    def create_likelihood(self):
        return GappyGridLikelihood(noise=0.7)
