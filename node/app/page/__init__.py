"""The run's page: a browser shows the run live, and its history.

    page = RunPage(PageSource(session=session, history=history, ...))
    app = Starlette(routes=page.routes())
    nursery.start_soon(page.run)

`public` decides what everybody may see and makes plain data of it. `feed` keeps the newest of it as
JSON for all viewers at once. `site` serves it: the page in one answer, and server-sent events.

In a closed run members see more, by a login link (`login`).

Nothing on the page can change anything: every route only answers GET, but the one that takes the
key of a login link. Names of peers are hostile
text, which the page only ever shows as text; a strict Content-Security-Policy is there in case that
this is wrong somewhere.
"""

from node.app.page.public import PageSource
from node.app.page.site import MOST_VIEWERS, LatestBoard, RunPage

__all__ = ["MOST_VIEWERS", "LatestBoard", "PageSource", "RunPage"]
