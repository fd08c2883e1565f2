"""Open the database, SQLite or PostgreSQL, and keep its schema: tables, migrations, hash chains.

Rows are read and written in the folder of their subject. Begin with `database.py`; the tables are in `schema.py` and
`ledger_schema.py`.
"""
