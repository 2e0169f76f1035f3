import pytest

from sparsepipe.errors import DataError
from sparsepipe.results.metrics import epoch_series, last_value, read_metrics


def test_reads_what_lightnings_csv_logger_writes(tmp_path):
    from pytorch_lightning.loggers import CSVLogger

    logger = CSVLogger(tmp_path, name="", version="")
    for epoch in range(2):
        for step in (0, 1):
            metrics = {"epoch": epoch, "train/loss": 4.0 - 2 * epoch - step}
            logger.log_metrics(metrics, step=2 * epoch + step)
        logger.log_metrics({"epoch": epoch, "val/accuracy": 0.5 + epoch / 4}, step=2 * epoch + 1)
    logger.save()
    rows = read_metrics(tmp_path / "metrics.csv")
    loss, accuracy = epoch_series(rows, "train/loss"), epoch_series(rows, "val/accuracy")
    assert (loss.epochs, loss.values) == ((0, 1), (3.5, 1.5))
    assert (accuracy.epochs, accuracy.values) == ((0, 1), (0.5, 0.75))
    assert len(epoch_series(rows, "val/loss")) == 0


def test_blank_unreadable_and_infinite_values_are_left_out():
    cells = ["1.0", "", None, "nan", "inf", "not yet", True, 3]
    rows = [{"epoch": "0", "step": i, "loss": cell} for i, cell in enumerate(cells)]
    rows.append({"epoch": "", "step": 99, "loss": 1000.0})
    assert epoch_series(rows, "loss").values == (2.0,)


def test_a_resumed_run_counts_only_the_steps_that_led_on():
    # Killed at step 12, resumed from the checkpoint after step 9.
    before = [{"epoch": s // 5, "step": s, "loss": 1.0} for s in range(13)]
    after = [{"epoch": s // 5, "step": s, "loss": 3.0} for s in range(10, 15)]
    assert epoch_series(before + after, "loss").values == (1.0, 1.0, 3.0)
    # A stale step later than the first repeated one is dropped as well.
    assert epoch_series([*before, after[0]], "loss").values == (1.0, 1.0, 3.0)
    # Another metric keeps its own history.
    val = [{"epoch": 0, "step": 4, "val": 0.5}]
    assert epoch_series(before + val + after, "val").values == (0.5,)


def test_rows_without_steps_give_the_last_value_of_each_epoch():
    rows = [{"epoch": 0, "loss": 2}, {"epoch": 1, "loss": 4}, {"epoch": 1, "loss": 1}]
    assert epoch_series(rows, "loss").values == (2.0, 1.0)


def test_last_value():
    rows = [{"test/accuracy": "0.5"}, {"test/accuracy": "0.75"}, {"test/accuracy": ""}]
    assert last_value(rows, "test/accuracy") == 0.75
    assert last_value(rows, "test/loss") is None


@pytest.mark.parametrize("content", [None, b"", b"epoch,step\n", b"\xff\xfe\x00bad"])
def test_unusable_files_are_data_errors_with_their_path(tmp_path, content):
    path = tmp_path / "metrics.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"metrics\.csv") as caught:
        read_metrics(path)
    assert caught.value.remedy
