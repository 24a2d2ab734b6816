"""Room runtime: the engine, from a verb to the rows of a step.

Holds, in the order a token meets them: the ``link``; ``verbs`` on a ``sequence`` and its ``tokens``; who
stands where (``roster``), and is likely to come back last (``holders``); who gets blocks (``pressure``) and to
whom they are promised (``leases``), which they are (``paging``), where KV lies (``lookup``); whose grammar is
compiled first (``constraints``, by ``guidance``); what is kept below (``moves``) or goes to disk
(``shelving``), comes back (``fetching``), and who waits for that (``errands``); what a step computes
(``planning`` makes a ``plan``, with ``courtesy`` to turns, the ``runner`` runs it on the ``model``); what it
changed (``commit``).
``scheduler`` and ``engine`` put these together, ``build`` and ``sizing`` make them from ``settings``,
``child`` is the process around them. ``pocket`` is the model that ships.
Does not know: text, items, conversations, sockets of clients.
May import: ``kvstore``, ``kernels``. Only ``model``, ``runner`` and ``build`` import torch.
"""
