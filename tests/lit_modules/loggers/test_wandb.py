import csv

from lit_modules.loggers.csv import MetricsCsv


def table(path):
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def test_each_row_is_in_the_file_at_once_and_a_new_metric_adds_a_column(tmp_path):
    logger = MetricsCsv(tmp_path)
    logger.log_metrics({"loss": 3.0}, step=1)
    assert table(logger.path) == [{"step": "1", "loss": "3.0"}]
    logger.log_metrics({"loss": 2.0, "gate": 0.5}, step=2)
    assert table(logger.path) == [
        {"step": "1", "loss": "3.0", "gate": ""},
        {"step": "2", "loss": "2.0", "gate": "0.5"},
    ]


def test_a_resumed_run_keeps_its_rows_and_drops_those_it_does_again(tmp_path):
    first = MetricsCsv(tmp_path)
    for step in range(1, 6):
        first.log_metrics({"loss": float(step)}, step=step)
    with open(first.path, "a") as handle:
        handle.write("6")  # cut by a kill
    second = MetricsCsv(tmp_path)
    second.resume_from(3)
    second.log_metrics({"loss": 40.0}, step=4)
    assert [(row["step"], row["loss"]) for row in table(second.path)] == [
        ("1", "1.0"),
        ("2", "2.0"),
        ("3", "3.0"),
        ("4", "40.0"),
    ]


def test_a_disk_that_takes_no_row_does_not_end_the_run(tmp_path, caplog):
    logger = MetricsCsv(tmp_path)
    logger.log_metrics({"loss": 3.0}, step=1)
    logger.path = tmp_path / "gone" / "metrics.csv"
    logger.log_metrics({"loss": 2.0}, step=2)
    assert "could not be written" in caplog.text


def test_a_column_that_the_disk_refused_leaves_the_file_right(tmp_path, monkeypatch):
    from lit_modules.loggers import csv

    logger = MetricsCsv(tmp_path)
    logger.log_metrics({"a": 1.0}, step=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(csv, "write_atomic", full)
        logger.log_metrics({"b": 2.0}, step=2)
    logger.log_metrics({"a": 3.0}, step=3)
    logger.log_metrics({"b": 4.0}, step=4)
    again = MetricsCsv(tmp_path)
    again.resume_from(9)
    assert [(row["step"], row["a"], row["b"]) for row in table(again.path)] == [
        ("1", "1.0", ""),
        ("3", "3.0", ""),
        ("4", "", "4.0"),
    ]


def test_the_wandb_run_of_a_folder_keeps_its_id_and_no_two_folders_share_one(tmp_path):
    from lit_modules.loggers.wandb import run_id

    first = run_id(tmp_path / "a")
    assert run_id(tmp_path / "a") == first
    assert run_id(tmp_path / "b") != first


def test_samples_on_a_wandb_page_are_shown_as_they_were_written():
    from lit_modules.loggers.wandb import table_page

    page = table_page(["step", "text"], [[3, "a < b\n<script>"], [4, "c"]])
    assert page.count("<tr>") == 3
    assert "<th>text</th>" in page
    assert "<td>3</td><td>a &lt; b\n&lt;script&gt;</td>" in page
