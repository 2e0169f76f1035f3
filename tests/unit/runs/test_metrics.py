import pytest

from sparsepipe.errors import DataError
from sparsepipe.runs.metrics import (
    add_to_last_row,
    epoch_series,
    last_value,
    read_metrics,
    write_rows,
)


def test_reads_one_row_an_epoch(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,lr,test/accuracy,train/loss,val/accuracy\n"
        "0,10,0.1,,3.5,0.5\n"
        "1,20,0.1,,2.5,\n"  # not validated
        "2,30,0.1,0.625,1.5,0.75\n"
    )
    rows = read_metrics(tmp_path / "metrics.csv")
    loss, accuracy = epoch_series(rows, "train/loss"), epoch_series(rows, "val/accuracy")
    assert (loss.epochs, loss.values) == ((0, 1, 2), (3.5, 2.5, 1.5))
    assert (accuracy.epochs, accuracy.values) == ((0, 2), (0.5, 0.75))
    assert last_value(rows, "test/accuracy") == 0.625
    assert len(epoch_series(rows, "val/loss")) == 0


def test_reads_what_a_run_writes(tmp_path):
    path = tmp_path / "metrics.csv"
    rows = [{"epoch": e, "step": 5 * e + 5, "train/loss": 2.0 - e} for e in range(2)]
    write_rows(path, [rows[0], rows[1] | {"val/loss": 1.25}])
    add_to_last_row(path, {"test/loss": 1.5})
    found = read_metrics(path)
    assert epoch_series(found, "train/loss").values == (2.0, 1.0)
    assert epoch_series(found, "val/loss").epochs == (1,)
    assert last_value(found, "test/loss") == 1.5


def test_blank_unreadable_and_infinite_values_are_left_out():
    cells = ["1.0", "", None, "nan", "inf", "not yet", True, 3]
    rows = [{"epoch": str(epoch), "loss": cell} for epoch, cell in enumerate(cells)]
    rows.append({"epoch": "", "loss": 1000.0})
    series = epoch_series(rows, "loss")
    assert (series.epochs, series.values) == ((0, 7), (1.0, 3.0))
    assert (last_value(rows, "loss"), last_value(rows[:-2], "loss")) == (1000.0, 1.0)
    assert last_value(rows, "test/loss") is None


def test_of_two_rows_for_an_epoch_the_later_counts():
    rows = [{"epoch": 0, "loss": 2}, {"epoch": 1, "loss": 4}, {"epoch": 1, "loss": 1}]
    assert epoch_series(rows, "loss").values == (2.0, 1.0)


@pytest.mark.parametrize("content", [None, b"", b"epoch,step\n", b"\xff\xfe\x00bad"])
def test_unusable_files_are_data_errors_with_their_path(tmp_path, content):
    path = tmp_path / "metrics.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"metrics\.csv") as caught:
        read_metrics(path)
    assert caught.value.remedy
