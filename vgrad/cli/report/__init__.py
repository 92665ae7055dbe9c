"""What a run shows: progress and a table while it lasts, pictures and a page after it.

The pictures and the page are made from the private data, without noise: they are not
for release.
"""

from vgrad.cli.report.console import display as display
from vgrad.cli.report.console import say as say
from vgrad.cli.report.console import show_table as show_table
from vgrad.cli.report.page import NO_CLAIM as NO_CLAIM
from vgrad.cli.report.page import PAGE as PAGE
from vgrad.cli.report.page import extensions as extensions
from vgrad.cli.report.page import release as release
from vgrad.cli.report.page import write_page as write_page
from vgrad.cli.report.pictures import COLOURS as COLOURS
from vgrad.cli.report.pictures import CURVES as CURVES
from vgrad.cli.report.pictures import PICTURES as PICTURES
from vgrad.cli.report.pictures import RELIABILITY as RELIABILITY
from vgrad.cli.report.pictures import UNCERTAIN as UNCERTAIN
from vgrad.cli.report.pictures import curves as curves
from vgrad.cli.report.pictures import draw as draw
from vgrad.cli.report.pictures import most_uncertain as most_uncertain
from vgrad.cli.report.pictures import reliability_diagram as reliability_diagram
from vgrad.cli.report.pictures import title as title
from vgrad.cli.report.pictures import write_picture as write_picture
