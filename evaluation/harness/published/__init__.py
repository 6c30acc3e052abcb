"""Named suites with the numbers of the papers that they are from: the choices of `benchmark.published`."""

from evaluation.harness.published import liger, sigma
from evaluation.harness.published.suite import Column, PublishedRow, PublishedSuite

SUITES: dict[str, PublishedSuite] = {
    "liger": liger.SUITE,
    "sigma_common_sense": sigma.COMMON_SENSE,
    "sigma_problem_solving": sigma.PROBLEM_SOLVING,
    "sigma_ablations": sigma.ABLATIONS,
}
# A checkpoint without a paper's numbers.
NO_SUITE = PublishedSuite(columns={}, means={}, rows=(), marked=(), note="")

__all__ = ["NO_SUITE", "SUITES", "Column", "PublishedRow", "PublishedSuite"]
