"""What the tests of a study start from: its data at smoke, and the network of a row with fixed parameters."""

import pytest
import torch


@pytest.fixture(scope="module")
def data(request):
    return request.module.STUDY.data(request.module.SETTING)


@pytest.fixture(scope="module")
def built(request, data):
    def network(row):
        torch.manual_seed(0)
        return request.module.STUDY.network(row, request.module.SETTING, data).eval()

    return network
