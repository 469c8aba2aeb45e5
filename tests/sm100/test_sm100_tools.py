"""tools/sm100_*.py: the timing model against measurements, the reader of machine code, and the pages that show their tables."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "kernels"


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.mark.parametrize("copied", (48, 64, 128))
def test_the_model_is_near_the_measured_times(copied, monkeypatch):
    """The assumed rate of the L2, which is the most uncertain constant, does not change this."""
    import sm100_chain_model as model

    monkeypatch.setattr(model, "COPIED", copied)
    for (chunk, warpgroups), times in model.MEASURED.items():
        for whole, measured in zip((False, True), times, strict=True):
            ns = model.hopper(chunk, warpgroups, whole).clocks() / model.HOPPER_GHZ / chunk
            assert abs(ns / measured - 1) < 0.15, (chunk, warpgroups, whole, ns, measured)


def test_the_chain_page_shows_the_predictions_of_the_model():
    import sm100_chain_model as model

    page = (PAGES / "sm100-chain.md").read_text()
    assert model.table() in page and model.cula_table() in page
    backward = (PAGES / "sm100-backward.md").read_text()
    assert model.reverse_table() in backward and model.backward_table() in backward
    assert model.PUBLISHED.keys() <= {case.name for case in model.public()}


def test_a_backward_is_predicted_from_its_parts():
    """Twice the sequences take twice as long where heads are many; saved states spare `recompute`; a slower memory or hop is not faster."""
    import sm100_chain_model as model

    cases = {case.name: case for case in model.training()}
    one, two = (model.backward_ms(cases[f"B{B}-T8192-H64"], 120, 6650, True) for B in (1, 2))
    assert all(1.9 < two[name] / ms < 2.1 for name, ms in one.items())
    saved = model.backward_ms(cases["B1-T8192-H64"], 120, 6650, False)
    assert saved["recompute"] == 0 < one["recompute"] and saved["gradients"] < 1.02 * one["gradients"]
    slow = model.backward_ms(cases["B1-T8192-H64"], 160, 3000, True)
    assert all(slow[name] >= ms for name, ms in one.items())


SASS = """
        .target sm_100a
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
{products}
        /*0140*/               @P0 BRA `(.L_x_0) ;
        /*0150*/              @!P1 EXIT ;
        /*0160*/                   EXIT ;
.L_x_1:
        /*0170*/                   BRA `(.L_x_1);
"""


def test_the_report_names_loops_by_their_instructions():
    import sm100_kernel_report as report

    products = "\n".join(
        f"        /*{i:04x}*/   @!UP0 HMMA.16816.F32.BF16 R8, R4, R2, R8 ;" for i in range(20)
    )
    code = report.parse(SASS.format(products=products))
    assert len(code.instructions) == 25 and code.mix()["HMMA"] == 20
    assert list(code.named_loops()) == [("products with a block of 16 columns", 1, 22)]
    assert report.shown(code.mix(*code.loops[0])) == "20 HMMA, 1 LDSM"
    assert report.shared_clocks("LDSM.16.M88.4") == report.shared_clocks("LDS.128") == 4
    assert report.turns(code, 64)[:2] == [4, 10]

    merge = SASS.format(products=products.replace("HMMA.16816.F32.BF16", "HMMA.1688.F32.TF32"))
    assert list(report.parse(merge).named_loops()) == [("per segment", 1, 22)]
    assert report.shared_clocks("LDG.E.128") == 4 and report.shared_clocks("LDGDEPBAR") == 0


def test_each_kernel_has_a_page_with_its_tables():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl: the kernel classes import it")
    import sm100_kernel_report as report

    from kda_sm100.variants import kernels

    shown = {name for variants in report.PAGES.values() for name in variants}
    assert {kernel.__name__ for kernel, _ in kernels()} == shown
    for page, variants in report.PAGES.items():
        text = (PAGES / f"{page}.md").read_text()
        assert f"python tools/sm100_kernel_report.py {page}" in text and "\n## Performance\n" in text
        assert all(f"| `{name}` |" in text for name in variants)
