"""`trunkline report`: one page of a training run, or of a rehearsed step, that needs nothing but a browser.

Neither torch nor matplotlib is loaded for the page: it is made from the files in a run's folder.
"""

from trunkline.report.timeline import Phase, Timeline
from trunkline.report.write import Written, write_report

__all__ = ["Phase", "Timeline", "Written", "write_report"]
