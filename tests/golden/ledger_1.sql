BEGIN TRANSACTION;
CREATE TABLE aliases (tenant VARCHAR(63) NOT NULL, model VARCHAR(63) NOT NULL, alias VARCHAR(63) NOT NULL, version VARCHAR(64) NOT NULL, PRIMARY KEY (tenant, model, alias), FOREIGN KEY (tenant, model, version) REFERENCES versions (tenant, model, version));
CREATE TABLE keys (key_id VARCHAR(12) NOT NULL PRIMARY KEY, tenant VARCHAR(63) NOT NULL REFERENCES tenants (tenant), secret_sha256 VARCHAR(64) NOT NULL, scopes TEXT NOT NULL, created_at_s BIGINT NOT NULL);
CREATE TABLE ledger_conflicts (
	digest VARCHAR(64) NOT NULL, 
	tenant VARCHAR(63), 
	subject VARCHAR(300) NOT NULL, 
	at_us BIGINT NOT NULL, 
	reason TEXT NOT NULL, 
	record TEXT NOT NULL, 
	PRIMARY KEY (digest)
);
INSERT INTO "ledger_conflicts" VALUES('095a5db2e7190cf9944bb029ba0dc5cc3b62204f2e28d218aaf59c2d91b7fee7','acme','req-1 (activator-1#6)',1793494800000006,'another record of this request by the same kind of writer says something else','{"request_id":"req-1","origin":"activator","source":"activator-1","sequence":6,"tenant":"acme","model":"m","version":"ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff","key_id":"key","runtime_id":"rt-1","started_at_us":1793494799999506,"ended_at_us":1793494800000006,"queued_us":3,"outcome":"ok","status":200,"stream":true,"prompt_tokens":10,"cached_tokens":4,"completion_tokens":7,"device_us":1000,"timeline":null}');
CREATE TABLE ledger_lifetimes (
	runtime_id VARCHAR(128) NOT NULL, 
	source VARCHAR(128) NOT NULL, 
	sequence BIGINT NOT NULL, 
	pid INTEGER NOT NULL, 
	tenant VARCHAR(63), 
	model VARCHAR(63), 
	version VARCHAR(64), 
	device_class VARCHAR(64) NOT NULL, 
	born_at_us BIGINT NOT NULL, 
	died_at_us BIGINT NOT NULL, 
	total_us BIGINT NOT NULL, 
	standby_us BIGINT NOT NULL, 
	restore_us BIGINT NOT NULL, 
	active_us BIGINT NOT NULL, 
	idle_us BIGINT NOT NULL, 
	requests BIGINT NOT NULL, 
	exit_status INTEGER NOT NULL, 
	cpu_us BIGINT NOT NULL, 
	max_rss_kb BIGINT NOT NULL, 
	PRIMARY KEY (runtime_id)
);
INSERT INTO "ledger_lifetimes" VALUES('rt-1','supervisor-1',1,1001,'acme','m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','cpu-1',1793498390000001,1793498400000001,10000000,500000,250000,2000000,7250000,2,0,10000000,100000);
INSERT INTO "ledger_lifetimes" VALUES('rt-2','supervisor-1',2,1002,'acme','m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','cpu-2',1793498390000002,1793498400000002,10000000,500000,250000,2000000,7250000,3,0,10000000,100000);
INSERT INTO "ledger_lifetimes" VALUES('rt-4','supervisor-1',4,1004,NULL,NULL,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','cpu-1',1793498390000004,1793498400000004,10000000,500000,250000,2000000,7250000,0,0,10000000,100000);
CREATE TABLE ledger_received (
	source VARCHAR(128) NOT NULL, 
	first BIGINT NOT NULL, 
	last BIGINT NOT NULL, 
	PRIMARY KEY (source, first)
);
INSERT INTO "ledger_received" VALUES('rt-2',1,2);
INSERT INTO "ledger_received" VALUES('activator-1',1,7);
INSERT INTO "ledger_received" VALUES('supervisor-1',1,2);
INSERT INTO "ledger_received" VALUES('supervisor-1',4,4);
CREATE TABLE ledger_requests (
	tenant VARCHAR(63) NOT NULL, 
	request_id VARCHAR(128) NOT NULL, 
	origin VARCHAR(16) NOT NULL, 
	orphan_of VARCHAR(128) NOT NULL, 
	source VARCHAR(128) NOT NULL, 
	sequence BIGINT NOT NULL, 
	model VARCHAR(63) NOT NULL, 
	version VARCHAR(64), 
	key_id VARCHAR(64) NOT NULL, 
	runtime_id VARCHAR(128), 
	started_at_us BIGINT NOT NULL, 
	ended_at_us BIGINT NOT NULL, 
	queued_us BIGINT NOT NULL, 
	outcome VARCHAR(64) NOT NULL, 
	status INTEGER NOT NULL, 
	stream BOOLEAN NOT NULL, 
	prompt_tokens BIGINT NOT NULL, 
	cached_tokens BIGINT NOT NULL, 
	completion_tokens BIGINT NOT NULL, 
	device_us BIGINT NOT NULL, 
	timeline TEXT, 
	stands BOOLEAN NOT NULL, 
	billable BOOLEAN NOT NULL, 
	PRIMARY KEY (tenant, request_id, origin, orphan_of)
);
INSERT INTO "ledger_requests" VALUES('acme','req-1','activator','','activator-1',1,'m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','key','rt-1',1793494799999501,1793494800000001,3,'ok',200,1,10,4,7,1000000,NULL,1,1);
INSERT INTO "ledger_requests" VALUES('acme','req-2','activator','','activator-1',2,'m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','key','rt-1',1793494799999502,1793494800000002,3,'ok',200,1,1000,0,7,900000,'[{"stage":"routed","at_us":5},{"stage":"ready","at_us":900},{"stage":"done","at_us":1000}]',1,1);
INSERT INTO "ledger_requests" VALUES('acme','req-3','activator','','activator-1',3,'m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','key','rt-2',1793494799999503,1793494800000003,3,'cancelled',499,1,10,4,0,1000,NULL,1,0);
INSERT INTO "ledger_requests" VALUES('acme','req-4','orphan','rt-2','rt-2',1,'m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','key','rt-2',1793494799999504,1793494800000004,3,'cancelled',200,1,10,4,64,1000,NULL,0,1);
INSERT INTO "ledger_requests" VALUES('acme','req-5','activator','','activator-1',5,'m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','key',NULL,1793494799999505,1793494800000005,3,'overloaded',503,1,0,0,0,0,NULL,1,0);
INSERT INTO "ledger_requests" VALUES('other','req-7','activator','','activator-1',7,'m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','key','rt-3',1793491199999499,1793491199999999,3,'ok',200,1,10,4,7,1000,NULL,1,1);
INSERT INTO "ledger_requests" VALUES('acme','req-8','orphan','rt-2','rt-2',2,'m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','key','rt-2',1793494799999508,1793494800000008,3,'cancelled',200,1,10,4,9,1000,NULL,1,1);
INSERT INTO "ledger_requests" VALUES('acme','req-4','activator','','activator-1',4,'m','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff','key','rt-2',1793494799999504,1793494800000004,3,'replica_lost',502,1,10,4,3,1000,NULL,1,1);
CREATE TABLE ledger_schema (number INTEGER PRIMARY KEY);
INSERT INTO "ledger_schema" VALUES(1);
CREATE TABLE ledger_sources (
	source VARCHAR(128) NOT NULL, 
	first_at_us BIGINT NOT NULL, 
	last_at_us BIGINT NOT NULL, 
	PRIMARY KEY (source)
);
INSERT INTO "ledger_sources" VALUES('activator-1',1793491199999999,1793494800000006);
INSERT INTO "ledger_sources" VALUES('rt-2',1793494800000004,1793494800000008);
INSERT INTO "ledger_sources" VALUES('supervisor-1',1793498400000001,1793498400000004);
CREATE TABLE models (tenant VARCHAR(63) NOT NULL REFERENCES tenants (tenant), model VARCHAR(63) NOT NULL, created_at_s BIGINT NOT NULL, min_replicas INTEGER NOT NULL, max_replicas INTEGER NOT NULL, target FLOAT, window_s FLOAT NOT NULL, grace_s FLOAT NOT NULL, PRIMARY KEY (tenant, model));
CREATE TABLE schema_version (number INTEGER PRIMARY KEY, name VARCHAR(64) NOT NULL);
INSERT INTO "schema_version" VALUES(1,'registry');
CREATE TABLE tenants (tenant VARCHAR(63) NOT NULL PRIMARY KEY, created_at_s BIGINT NOT NULL);
CREATE TABLE versions (tenant VARCHAR(63) NOT NULL, model VARCHAR(63) NOT NULL, version VARCHAR(64) NOT NULL, state VARCHAR(16) NOT NULL, fault VARCHAR(64), limits TEXT NOT NULL, architecture TEXT NOT NULL, weight_bytes BIGINT NOT NULL, total_bytes BIGINT NOT NULL, kv_bytes_per_token BIGINT NOT NULL, max_positions BIGINT NOT NULL, created_at_s BIGINT NOT NULL, PRIMARY KEY (tenant, model, version), FOREIGN KEY (tenant, model) REFERENCES models (tenant, model));
CREATE INDEX ledger_requests_by_runtime ON ledger_requests (runtime_id, tenant, request_id, device_us);
CREATE INDEX ledger_requests_by_end ON ledger_requests (tenant, ended_at_us);
CREATE INDEX ledger_lifetimes_by_end ON ledger_lifetimes (tenant, died_at_us);
CREATE INDEX ledger_conflicts_by_end ON ledger_conflicts (tenant, at_us);
COMMIT;
