"""The federation's clients on Flower: its simulation, or nodes with data of their own.

protocol.py    what server and nodes say to each other
trust.py       what the server accepts of it
agree.py       the classes of all nodes, by name
store.py       clients' state on a node's disk
node.py        what a node does when it is asked
finished.py    models for `fedsap predict`, at the end
roster.py      which nodes are there, and which clients each has
launch.py      `fedsap run --engine flower`

post.py        records and tensors as Flower's messages
gate.py        asks nodes that come who they are
remote.py      the engine: `training.rounds.Clients` over a Flower Grid
server_app.py  client_app.py   the two Flower apps

Only the second part imports Flower.
"""
