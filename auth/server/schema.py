"""The tables of the auth server, as numbered migrations.

A file is at version n when the first n texts have run on it. Append, never change: files of every
version are out there, and `tests/auth/store` opens one of each.

Easy to get wrong: the triggers that forbid changing the audit log are a belt, not the braces.
Whoever can open the file can drop them. What finds an edit is the hash chain (`audit.py`).
"""

from __future__ import annotations

# "pot3" in ASCII, in the field that SQLite has for saying whose file it is.
APPLICATION_ID = 0x706F7433

_FIRST = """
    CREATE TABLE store (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        run TEXT NOT NULL,
        made_ms INTEGER NOT NULL,
        last_serial INTEGER NOT NULL,
        grace_ms INTEGER NOT NULL,
        unsure_until_ms INTEGER NOT NULL,
        backup_ms INTEGER
    );

    CREATE TABLE audit (
        number INTEGER PRIMARY KEY,
        at_ms INTEGER NOT NULL,
        act TEXT NOT NULL,
        actor TEXT NOT NULL,
        name TEXT,
        peer BLOB,
        serial INTEGER,
        reason TEXT NOT NULL,
        detail TEXT NOT NULL,
        hash BLOB NOT NULL
    );
    CREATE TRIGGER audit_is_append_only BEFORE INSERT ON audit
        WHEN NEW.number IS NOT (SELECT coalesce(max(number), 0) + 1 FROM audit)
        BEGIN SELECT raise(ABORT, 'the audit log is only ever appended to'); END;
    CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit
        BEGIN SELECT raise(ABORT, 'the audit log is only ever appended to'); END;
    CREATE TRIGGER audit_is_not_deleted BEFORE DELETE ON audit
        BEGIN SELECT raise(ABORT, 'the audit log is only ever appended to'); END;
    CREATE TABLE audit_head (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        number INTEGER NOT NULL,
        hash BLOB NOT NULL,
        key_id BLOB NOT NULL,
        signature BLOB NOT NULL
    );

    CREATE TABLE accounts (
        account INTEGER PRIMARY KEY,
        provider TEXT NOT NULL,
        login TEXT NOT NULL,
        subject TEXT,
        roles TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('allowed', 'denied', 'revoked')),
        added_ms INTEGER NOT NULL,
        added_by TEXT NOT NULL,
        changed_ms INTEGER NOT NULL,
        changed_by TEXT NOT NULL,
        note TEXT NOT NULL,
        UNIQUE (provider, login)
    );
    CREATE UNIQUE INDEX accounts_by_subject ON accounts (provider, subject)
        WHERE subject IS NOT NULL;
    CREATE INDEX accounts_by_login ON accounts (login);

    CREATE TABLE peers (
        peer BLOB PRIMARY KEY,
        account INTEGER NOT NULL REFERENCES accounts,
        first_ms INTEGER NOT NULL,
        login_ms INTEGER NOT NULL,
        seen_ms INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX peers_by_account ON peers (account);

    CREATE TABLE tokens (
        serial INTEGER PRIMARY KEY,
        account INTEGER NOT NULL REFERENCES accounts,
        peer BLOB NOT NULL,
        roles TEXT NOT NULL,
        key_id BLOB NOT NULL,
        issued_ms INTEGER NOT NULL,
        expires_ms INTEGER NOT NULL
    );
    CREATE INDEX tokens_by_account ON tokens (account, expires_ms);

    CREATE TABLE codes (
        code INTEGER PRIMARY KEY,
        code_hash BLOB NOT NULL UNIQUE,
        login TEXT,
        roles TEXT NOT NULL,
        uses_allowed INTEGER,
        uses INTEGER NOT NULL,
        expires_ms INTEGER,
        made_ms INTEGER NOT NULL,
        made_by TEXT NOT NULL,
        cancelled_ms INTEGER,
        note TEXT NOT NULL
    );
    CREATE TABLE code_uses (
        code INTEGER NOT NULL REFERENCES codes,
        peer BLOB NOT NULL,
        account INTEGER NOT NULL REFERENCES accounts,
        at_ms INTEGER NOT NULL,
        PRIMARY KEY (code, peer)
    ) WITHOUT ROWID;

    CREATE TABLE signing_keys (
        key_id BLOB PRIMARY KEY,
        public_key BLOB NOT NULL,
        from_ms INTEGER NOT NULL,
        until_ms INTEGER NOT NULL,
        endorsed_by BLOB NOT NULL,
        signature BLOB NOT NULL,
        made_ms INTEGER NOT NULL,
        withdrawn_ms INTEGER,
        place INTEGER NOT NULL UNIQUE
    ) WITHOUT ROWID;

    CREATE TABLE revocations (
        entry INTEGER PRIMARY KEY,
        kind TEXT NOT NULL CHECK (kind IN ('name', 'peer', 'serial')),
        value BLOB NOT NULL,
        revoked_ms INTEGER NOT NULL,
        forget_ms INTEGER NOT NULL,
        revoked_by TEXT NOT NULL,
        reason TEXT NOT NULL,
        lifted_ms INTEGER
    );
    CREATE INDEX revocations_by_value ON revocations (kind, value);
    CREATE TABLE revocation_list (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        number INTEGER NOT NULL,
        issued_ms INTEGER NOT NULL,
        document BLOB NOT NULL
    );
"""

MIGRATIONS: tuple[str, ...] = (_FIRST,)
