/* SPDX-License-Identifier: Apache-2.0 */
/* libpaceline: the functions of paceline.h. It finds Python and hands each call to paceline_c/bridge.py.

   It needs neither Python's headers nor its library to be built: it looks up functions of the stable ABI, in a Python
   that the process has already, or in the libpython of the one it was built for (PACELINE_PYTHON names another). So one
   library serves every Python from 3.10 on. */
#define _GNU_SOURCE
#include "paceline.h"
#include "python_functions.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>

#ifndef PL_BUILT_FOR
#define PL_BUILT_FOR "python3"
#endif

extern char **environ;

/* What the Python half returns. */
struct answer {
  int status;
  const char *text;
  long long first, second;
  double value;
  long long call; /* its number among all */
};

static _Thread_local char sentence[4096];
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static enum { UNKNOWN, FOUND, OURS } python = UNKNOWN; /* OURS: started here */
static pthread_once_t at_exit_once = PTHREAD_ONCE_INIT, attached_once = PTHREAD_ONCE_INIT;
static volatile int forked = 0; /* a child of the process that attached: the run's threads and Python's are not here */

static int fail(int status, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  return status;
}

/* -- finding Python ------------------------------------------------------------------------------------------------ */

/* Fill the table; the name of a function that is missing, or NULL. */
static const char *look_up(void *library) {
#define LOOK(type, name, arguments)                   \
  *(void **)&py.name = dlsym(library, #name);         \
  if (py.name == NULL) return #name;
  PYTHON_FUNCTIONS(LOOK)
  return NULL;
}

/* Run `program -m paceline_c.where`, and keep the first line that it prints; its exit status, or -1. A child also shows
   whether this Python starts at all: an interpreter that cannot start ends its process. */
static int ask(const char *program, char *line, size_t size) {
  const char *arguments[] = {program, "-m", "paceline_c.where", NULL};
  posix_spawn_file_actions_t actions;
  int ends[2], status = -1, wrong;
  size_t used = 0;
  ssize_t got;
  pid_t child;

  if (pipe2(ends, O_CLOEXEC) != 0) return -1;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  wrong = posix_spawnp(&child, program, &actions, NULL, (char *const *)arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (wrong == 0) {
    while (used + 1 < size && (got = read(ends[0], line + used, size - 1 - used)) != 0) {
      if (got > 0) used += (size_t)got;
      if (got < 0 && errno != EINTR) break;
    }
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
  }
  close(ends[0]);
  line[used] = '\0';
  line[strcspn(line, "\n")] = '\0';
  return status;
}

static int start_python(void) {
  const char *program = getenv("PACELINE_PYTHON"), *missing;
  char library[4096];
  wchar_t *name;
  struct sigaction pipe_action;
  void *opened = NULL;

  if (program == NULL || *program == '\0') program = PL_BUILT_FOR;
  if (dlsym(RTLD_DEFAULT, "Py_IsInitialized") == NULL) {
    if (ask(program, library, sizeof library) != 0 || library[0] == '\0')
      return fail(PL_PYTHON,
                  "%s cannot be started, has no paceline_c or no shared libpython (its own words are on stderr); "
                  "install paceline-c there, or name another Python: PACELINE_PYTHON=/path/to/venv/bin/python", program);
    opened = dlopen(library, RTLD_NOW | RTLD_GLOBAL); /* global: extension modules look for it there */
    if (opened == NULL) return fail(PL_PYTHON, "%s of %s cannot be loaded: %s", library, program, dlerror());
  }
  missing = look_up(opened != NULL ? opened : RTLD_DEFAULT);
  if (missing != NULL) return fail(PL_PYTHON, "the Python of this process lacks %s; Python 3.10 or later is needed", missing);
  python = FOUND;
  if (py.Py_IsInitialized()) return PL_OK;
  if (opened == NULL && ask(program, library, sizeof library) != 0)
    return fail(PL_PYTHON, "%s cannot be started (its own words are on stderr); name another: PACELINE_PYTHON", program);
  name = py.Py_DecodeLocale(program, NULL);
  if (name == NULL) return fail(PL_PYTHON, "the path of Python, %s, is no text in this locale", program);
  py.Py_SetProgramName(name); /* Python finds the virtual environment by it, and keeps the pointer */
  py.Py_InitializeEx(0);      /* signals stay the tool's */
  if (sigaction(SIGPIPE, NULL, &pipe_action) == 0 && pipe_action.sa_handler == SIG_DFL)
    signal(SIGPIPE, SIG_IGN); /* else a write to a worker that has died ends this one */
  py.PyEval_SaveThread();     /* the tool's threads run */
  python = OURS;
  return PL_OK;
}

static void note_fork(void) { forked = 1; }

static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

/* Make sure that there is a Python; holds no lock of Python's. */
static int ensure_python(void) {
  int status = PL_OK;
  if (forked)
    return fail(PL_STATE, "this process was forked from the one that attached, which alone may call; "
                          "fork before pl_attach, or end the child by _exit");
  pthread_mutex_lock(&starting);
  if (python == UNKNOWN)
    status = start_python();
  else if (!py.Py_IsInitialized())
    status = fail(PL_PYTHON, "Python has been finalised in this process, and the run with it; call pl_close before that");
  pthread_mutex_unlock(&starting);
  return status;
}

/* -- steps in the middle of a block --------------------------------------------------------------------------------- */

/* Python says after a step how many follow in which it has nothing to do. They are counted here, since code of Python's
   that is no longer in the processor's caches takes tenths of a millisecond, and Python makes them up in its next call. */
enum { LONGEST_NS = 100000000 }; /* requests to tune and the log wait no longer than that */
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;
static int64_t quiet = 0, until_ns = 0; /* steps that may be counted here, and until when */
static long long counted = 0, calls = 0;

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Whether this step was counted. */
static int count_step(void) {
  int fits;
  if (forked) return 0;
  pthread_mutex_lock(&counting);
  fits = quiet > 0 && now_ns() < until_ns;
  quiet -= fits;
  counted += fits;
  pthread_mutex_unlock(&counting);
  return fits;
}

/* After call number `call`; if another thread has made one since, that may have ended the block. */
static void allow_steps(int64_t many, long long call) {
  pthread_mutex_lock(&counting);
  if (call == calls) {
    quiet = many;
    until_ns = now_ns() + LONGEST_NS;
  }
  pthread_mutex_unlock(&counting);
}

/* The steps that Python does not know yet, before a call; none is counted here until a step returns. */
static long long take_steps(long long *call) {
  long long taken;
  pthread_mutex_lock(&counting);
  taken = counted;
  counted = quiet = 0;
  *call = ++calls;
  pthread_mutex_unlock(&counting);
  return taken;
}

/* -- calling it ---------------------------------------------------------------------------------------------------- */

/* Keep the sentence of a Python exception that the Python half did not catch; mostly it could not be imported. */
static int raised(void) {
  PyObject *type = NULL, *value = NULL, *trace = NULL, *text = NULL, *bytes = NULL;
  py.PyErr_Fetch(&type, &value, &trace);
  if (value != NULL) text = py.PyObject_Str(value);
  if (text != NULL) bytes = py.PyUnicode_AsUTF8String(text);
  fail(PL_PYTHON, "the Python of this process cannot make the call (%s); install paceline-c in it, or put it on PYTHONPATH",
       bytes != NULL ? py.PyBytes_AsString(bytes) : "no reason is given");
  py.Py_DecRef(bytes);
  py.Py_DecRef(text);
  py.Py_DecRef(trace);
  py.Py_DecRef(value);
  py.Py_DecRef(type);
  py.PyErr_Clear();
  return PL_PYTHON;
}

/* Call a function of the bridge; with Python's lock. */
static int call_locked(struct answer *answer, const char *function, const char *format, va_list arguments) {
  PyObject *module = py.PyImport_ImportModule("paceline_c.bridge"), *called = NULL, *given = NULL, *result = NULL;
  int status = PL_PYTHON;
  if (module != NULL) called = py.PyObject_GetAttrString(module, function);
  if (called != NULL) given = py.Py_VaBuildValue(format, arguments);
  if (given != NULL) result = py.PyObject_CallObject(called, given);
  if (result != NULL && py.PyArg_ParseTuple(result, "isLLd", &answer->status, &answer->text, &answer->first,
                                            &answer->second, &answer->value)) {
    status = answer->status;
    if (status < 0) fail(status, "%s", answer->text); /* copied: the text ends with the result */
  } else {
    raised();
  }
  py.Py_DecRef(result);
  py.Py_DecRef(given);
  py.Py_DecRef(called);
  py.Py_DecRef(module);
  return status;
}

static int make_up(long long steps, ...) {
  struct answer answer;
  va_list arguments;
  int status;
  va_start(arguments, steps);
  status = call_locked(&answer, "make_up", "(L)", arguments);
  va_end(arguments);
  return status;
}

static int call(struct answer *answer, const char *function, const char *format, ...) {
  va_list arguments;
  int status = ensure_python(), lock;
  long long steps;
  if (status < 0) return status;
  steps = take_steps(&answer->call);
  lock = py.PyGILState_Ensure();
  if (steps > 0) status = make_up(steps, steps);
  if (status >= 0 || strcmp(function, "abandon") == 0 || strcmp(function, "leave") == 0) {
    va_start(arguments, format);
    status = call_locked(answer, function, format, arguments);
    va_end(arguments);
  }
  py.PyGILState_Release(lock);
  return status;
}

static int simply(const char *function) {
  struct answer answer;
  return call(&answer, function, "()");
}

static unsigned long long address(const void *pointer) { return (unsigned long long)(uintptr_t)pointer; }

/* -- a tool that ends without pl_close ------------------------------------------------------------------------------ */

/* Close the run if the tool ended well, else leave at once. Python's own way, its atexit, needs a finalised Python. */
static void leave(int code, void *nothing) {
  struct answer answer;
  (void)nothing;
  if (forked || !py.Py_IsInitialized()) return;
  if (call(&answer, "leave", "(i)", code) < 0) fprintf(stderr, "paceline: %s\n", sentence);
}

static void register_exit(void) { on_exit(leave, NULL); }

/* -- paceline.h ---------------------------------------------------------------------------------------------------- */

int pl_set(const char *name, const char *value) {
  struct answer answer;
  return call(&answer, "set_", "(yy)", name, value);
}

int pl_buffers(int count, void *const *arrays, const int64_t *sizes, const int *dtypes) {
  struct answer answer;
  return call(&answer, "buffers", "(iKKK)", count, address(arrays), address(sizes), address(dtypes));
}

int pl_momentum(int count, void *const *arrays, double decay) {
  struct answer answer;
  return call(&answer, "momentum", "(iKd)", count, address(arrays), decay);
}

int pl_attach(int count, void *const *arrays, const int64_t *sizes, const int *dtypes, const char *device,
              const char *rule) {
  struct answer answer;
  int status = call(&answer, "attach", "(iKKKyy)", count, address(arrays), address(sizes), address(dtypes), device, rule);
  /* after the libraries that Python has loaded by now, so that it runs before their own ends */
  if (status >= 0 && python == OURS) pthread_once(&at_exit_once, register_exit);
  if (status >= 0) pthread_once(&attached_once, watch_forks);
  return status;
}

int pl_mean(void *const *gradients) {
  struct answer answer;
  return call(&answer, "mean", "(K)", address(gradients));
}

int pl_step(void) {
  struct answer answer;
  int status;
  if (count_step()) return PL_OK;
  status = call(&answer, "step", "()");
  if (status == PL_OK && answer.first > 0) allow_steps((int64_t)answer.first, answer.call);
  return status;
}

int pl_next_range(int64_t total, int64_t batch, int64_t *begin, int64_t *end) {
  struct answer answer;
  int status;
  if (begin == NULL || end == NULL)
    return fail(PL_INVALID, "pl_next_range: begin and end must point to where the range goes, and one of them is NULL");
  *begin = *end = 0;
  status = call(&answer, "next_range", "(LL)", (long long)total, (long long)batch);
  if (status == PL_MORE) {
    *begin = answer.first;
    *end = answer.second;
  }
  return status;
}

int pl_done(void) { return simply("done"); }

int pl_merge(void) { return simply("merge"); }

int pl_global_model(int inside) {
  struct answer answer;
  return call(&answer, "global_model", "(i)", inside);
}

int pl_tuned(const char *name, double preset, double *value) {
  struct answer answer;
  int status;
  if (value == NULL) return fail(PL_INVALID, "pl_tuned: value must point to where the setting goes, and is NULL");
  *value = preset;
  status = call(&answer, "tuned", "(yd)", name, preset);
  if (status >= 0) *value = answer.value;
  return status;
}

int pl_tune(const char *name, double value) {
  struct answer answer;
  return call(&answer, "tune", "(yd)", name, value);
}

int pl_log(const char *name, double value) {
  struct answer answer;
  return call(&answer, "log", "(yd)", name, value);
}

int pl_save(const char *path) {
  struct answer answer;
  return call(&answer, "save", "(y)", path);
}

int pl_resume(const char *path) {
  struct answer answer;
  return call(&answer, "resume", "(y)", path);
}

static int64_t number(const char *function) {
  struct answer answer;
  int status = call(&answer, function, "()");
  return status < 0 ? status : (int64_t)answer.first;
}

int pl_rank(void) { return (int)number("rank"); }

int pl_size(void) { return (int)number("size"); }

int pl_epoch(void) { return (int)number("epoch"); }

int64_t pl_minibatches(void) { return number("minibatches"); }

int pl_close(void) { return simply("close"); }

int pl_abandon(void) { return simply("abandon"); }

const char *pl_error(void) { return sentence; }
