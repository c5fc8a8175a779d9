"""`trunkline report`: one page of a training run, or of an estimated step, that needs nothing but a browser."""

from trunkline.report.report_folder import WrittenReport, write_report
from trunkline.report.timeline import Phase, Timeline

__all__ = ["Phase", "Timeline", "WrittenReport", "write_report"]
